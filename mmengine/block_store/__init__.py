"""Where KV blocks are kept beyond the process that computed them."""
