"""Search spaces, and the searches that propose configurations from them."""
