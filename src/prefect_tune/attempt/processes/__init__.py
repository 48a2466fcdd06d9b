"""The processes of trials as their supervisor has them: pool, fork servers, channel, output, environment."""
