"""Recorded logs: logs with the decisions of another engine's scheduler, which is called the host. This
package reads the steps of such a log, and derives them again with the host's rules.
docs/reference/recorded-logs.md describes the format of such a log.
"""
