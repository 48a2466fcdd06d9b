"""Where bytes live: configuration and credentials; decides nothing."""
