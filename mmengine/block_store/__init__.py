"""Stores KV blocks outside the process that computed them."""
