"""The page /live, which draws the growing log in a browser and has a playground for chats."""
