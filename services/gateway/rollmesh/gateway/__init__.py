"""The gateway: sessions, the conversation tree, exact tokens behind chat messages."""
