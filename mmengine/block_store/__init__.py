"""Keep KV blocks beyond the process that computed them."""
