"""Images in conversations: how many tokens each one takes, and where they are."""
