"""When blocks run short, who has the longest prompt gives way, not who was admitted last."""

from mmengine.core.state import policy


def longest(view):
    return max(view.running.tolist(), key=lambda row: view.requests_by_row[row].num_prompt)


policy.FCFS = policy.FCFS._replace(victim=longest)
