"""A naive scheduler with plain lists, written from docs/explanation/policies.md, docs/how-to/simulation.md
and the scheduling rules. Tests compare its records for a scenario with the simulation's records.

Each policy's `Rules` have the functions `rank(request)` and `victim(running)`, and the flag `prefill_first`.
"""

import zlib
from typing import NamedTuple

from naive_pools import Asking, Blocks, Encoder, Naive
from simulated import prompt_length, token

from mmengine.simulation.workload_files import load_workload


class Rules(NamedTuple):
    rank: callable
    victim: callable
    prefill_first: bool = False


def by_arrival(who):
    return (who.arrival,)


def by_priority(who):
    return (who.raw.get("priority", 0), who.arrival)


def by_rest(who):
    return (prompt_length(who.raw) + who.raw["max_tokens"] - who.queued_with, who.arrival)


RULES = {
    "fcfs": Rules(by_arrival, lambda running: running[-1]),
    "prefill_first": Rules(by_arrival, lambda running: running[-1], prefill_first=True),
    "priority": Rules(by_priority, lambda running: max(running, key=by_priority)),
    "shortest_rest": Rules(by_rest, lambda running: max(running, key=by_rest)),
}


class NaiveScheduler:
    """Runs the scenario `raw` from the file `path` with the EngineConfig `config`. The scenario must have no
    `reset_prefix_cache`, and no abort while a step runs ("when": "before_update").
    """

    def __init__(self, path, raw, config):
        self.config, self.rules = config, RULES[config.policy]
        self.raw = raw
        self.prompts = {each.request_id: each.prompt().tolist() for each in load_workload(path).requests}
        self.lookahead = config.lookahead_tokens
        self.ahead = int(bool(self.lookahead))
        size = config.block_size
        self.blocks = Blocks(config.num_blocks - 1, size, self.ahead, config.enable_prefix_caching)
        self.encoder = Encoder(config.encoder_cache_size)
        self.running, self.waiting, self.records = [], [], []

    def run(self):
        requests = sorted(self.raw["requests"], key=lambda each: each["arrival_step"])
        step = 0
        while step <= max(each["arrival_step"] for each in requests) or self.running or self.waiting:
            self.record = {"step": step, "preempt": [], "enc_evict": [], "admit": {}, "enc": {}, "finish": {}}
            for number, raw in enumerate(requests):
                if raw["arrival_step"] == step:
                    known = list(self.prompts[raw["id"]])
                    self.queue(Naive(raw, number, known, not raw.get("grammar")))
            self.happen([event for event in self.raw["events"] if event["step"] == step])
            busy = bool(self.running or self.waiting)
            self.decide()
            if busy:
                self.compute()
                self.records.append(self.record)
            step += 1
        return self.records

    def queue(self, who):
        who.queued_with = len(who.known)
        self.waiting = sorted([*self.waiting, who], key=self.rules.rank)

    def happen(self, events):
        ends = {"abort": [], "grammar_error": []}
        for event in events:
            who = next((each for each in self.running + self.waiting if each.name == event["id"]), None)
            if who is not None and event["op"] == "grammar_ready":
                who.grammar_ready = True
            elif who is not None and (event["op"] == "abort" or not who.grammar_ready):
                ends[event["op"]].append(who)
        for who in dict.fromkeys([*ends["abort"], *ends["grammar_error"]]):
            self.leave(who)

    def leave(self, who):
        for index in sorted(who.held):
            self.encoder.let_go(who, index)
        self.blocks.release(who)
        self.running = [each for each in self.running if each is not who]
        self.waiting = [each for each in self.waiting if each is not who]

    # Decisions of a step

    def decide(self):
        self.left, self.encoder_left = self.config.token_budget, self.config.encoder_budget
        self.sched, self.spec = [], {}
        if not self.rules.prefill_first:
            self.serve_running(lambda: self.running)
            self.admit()
            return
        self.serve_running(lambda: [who for who in self.running if len(who.known) - who.computed > 1])
        self.admit()
        if not self.sched:
            self.serve_running(lambda: self.running)
            self.admit()

    def serve_running(self, chosen):
        """Schedule the running requests. If too few blocks are free, preempt the victim and start again."""
        while chosen():
            rows, asking = self.wanted(chosen())
            needed = sum(self.further(who, count) for who, count in rows)
            if needed <= len(self.blocks.free):
                self.serve(rows, asking)
                return
            victim = self.rules.victim(self.running)
            self.record["preempt"].append(victim.name)
            self.leave(victim)
            victim.computed, victim.drafts = 0, []
            self.queue(victim)

    def wanted(self, rows):
        asking, left, wanted = self.asking(), self.left, []
        for who in rows:
            count = len(who.known) + len(who.drafts) - who.computed
            count = min(count, self.threshold() or count, left)
            if any(each.drafts for each in self.running):
                count = min(count, self.config.max_model_len - 1 - who.computed)
            count = asking.chunk(who, who.computed, count)
            left -= count
            wanted += [(who, count)] if count > 0 else []
        return wanted, asking

    def asking(self):
        return Asking(self.encoder, self.encoder_left, self.ahead, not self.config.split_media)

    def threshold(self):
        return self.config.long_prefill_token_threshold if len(self.running + self.waiting) > 1 else 0

    def blocks_for(self, count):
        return -(-min(count + self.lookahead, self.config.max_model_len) // self.config.block_size)

    def further(self, who, count):
        return max(0, self.blocks_for(who.computed + count) - len(who.blocks))

    def serve(self, rows, asking):
        self.encode(asking)
        for who, count in rows:
            who.blocks += self.blocks.take(self.further(who, count))
        for who, count in rows:
            drafts = max(0, who.computed + count - len(who.known))
            if drafts:
                self.spec[who.name] = drafts
            self.go(who, count, who.drafts[:drafts])
        self.blocks.fill([who for who, _ in rows])

    def go(self, who, count, drafts):
        before = who.computed
        who.computed, who.drafts = before + count, drafts
        self.left -= count
        self.sched.append((who, count))
        for index, (place, size, hash_) in enumerate(who.images):
            read = place < who.computed or (place < who.computed + self.ahead and hash_ in self.encoder.sizes)
            if read and place + size > before and index not in who.held:
                self.encoder.hold(who, index)

    def encode(self, asking):
        for gone in asking.evict:
            self.encoder.evict(gone)
            self.record["enc_evict"].append(gone)
        for who, index, hash_, size in asking.encode:
            self.encoder.add(hash_, size)
            self.encoder_left -= size
            self.record["enc"].setdefault(who.name, []).append(index)

    def admit(self):
        """Admit by rank. Skip requests that wait for a grammar or an encoder output. Stop at a request that
        waits for blocks.
        """
        for who in list(self.waiting):
            if self.record["preempt"] and self.running:
                return
            if self.left <= 0 or len(self.running) == self.config.max_num_seqs:
                return
            if not who.grammar_ready:
                continue
            cached = self.blocks.prefix(who)
            computed = len(cached) * self.config.block_size
            count = min(len(who.known) - computed, self.left)
            count = min(count, self.threshold() or count)
            asking = self.asking()
            count = asking.chunk(who, computed, count)
            if not count:
                continue
            new = self.blocks_for(computed + count) - len(cached)
            reserved = self.reserved(who) - len(cached)
            revived = sum(not block.holders for block in cached)
            if max(new, reserved) + revived > len(self.blocks.free):
                return
            self.blocks.share(cached)
            who.blocks = cached + self.blocks.take(new)
            who.computed, who.num_filled, who.drafts = computed, len(cached), []
            self.waiting.remove(who)
            self.running.append(who)
            self.record["admit"][who.name] = computed
            self.encode(asking)
            self.go(who, count, [])
            self.blocks.fill([who])

    def reserved(self, who):
        most = {
            "none": 0,
            "prompt": len(who.known),
            "output": min(prompt_length(who.raw) + who.raw["max_tokens"], self.config.max_model_len),
        }[self.config.admission_reserve]
        return self.blocks_for(most) if most else 0

    # Results of a step

    def compute(self):
        record = self.record
        record |= {"sched": [[who.name, count] for who, count in self.sched], "spec": self.spec}
        idle = sum(self.encoder.sizes[hash_] for hash_ in self.encoder.idle)
        free = self.encoder.capacity - self.encoder.used
        record |= {"free": len(self.blocks.free), "enc_free": [free, free + idle]}
        record |= {
            "running": [who.name for who in self.running],
            "waiting": [who.name for who in self.waiting],
        }
        record["out"], ended = {}, {}
        for who, _ in self.sched:
            if who.computed >= len(who.known):
                tokens, reason = self.sample(who)
                record["out"][who.name] = tokens
                ended |= {who: reason} if reason else {}
                who.known += tokens
                who.computed = len(who.known) - 1
                who.drafts = [] if reason else drafts_of(who, len(who.known), self.config.num_draft_tokens)
        for who, _ in self.sched:
            for index in sorted(who.held):
                if sum(who.images[index][:2]) <= who.computed:
                    self.encoder.let_go(who, index)
        for who in [each for each in self.running if each in ended]:
            record["finish"][who.name] = ended[who]
            if ended[who] == "error":
                for block in who.blocks:
                    self.blocks.forget(block)
            self.leave(who)

    def sample(self, who):
        """Return the accepted drafts with the model's next token, and the finish reason ("" for an unfinished
        request).
        """
        tokens, most = [], min(len(self.prompts[who.name]) + who.raw["max_tokens"], self.config.max_model_len)
        for draft in [*who.drafts, None]:
            tokens.append(token(who.raw, who.num_output))
            who.num_output += 1
            if tokens[-1] == 7 and who.raw.get("grammar"):
                return tokens, "error"
            if tokens[-1] == who.raw.get("stop_token"):
                return tokens, "stop"
            if len(who.known) + len(tokens) >= most:
                return tokens, "length"
            if draft != tokens[-1]:
                break
        return tokens, ""


def drafts_of(who, place, count):
    """Return at most `count` drafts: first right drafts (a checksum determines how many), then wrong drafts.
    The list ends before the first draft that the grammar forbids.
    """
    raw, drafts = {**who.raw, "inject_bad_at": None}, []
    right = zlib.crc32(f"acc:{who.name}:{place}".encode()) % (count + 1)
    spoiled = zlib.crc32(f"inv:{who.name}:{place}".encode()) % 2
    for number in range(count):
        index = place + number - prompt_length(raw)
        ranges = raw["grammar"]["ranges"] if raw.get("grammar") else [[1000, 31000]]
        low, high = ranges[index % len(ranges)]
        one = token(raw, index)
        if number >= right:
            one = 7 if raw.get("grammar") and spoiled else low + (one - low + 1) % (high - low)
        if raw.get("grammar") and not low <= one < high:
            break
        drafts.append(one)
    return drafts
