"""A planted bug: the request with the longest prompt is preempted, not the last admitted request."""

from mmengine.core.state import policy


def longest(view):
    return max(view.running.tolist(), key=lambda row: view.requests_by_row[row].num_prompt)


policy.FCFS = policy.FCFS._replace(victim=longest)
