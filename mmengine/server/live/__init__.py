"""The page /live: draws the growing log in a browser, with a playground for chats."""
