"""The processes of trials: pool, fork servers, channels, output and environment."""
