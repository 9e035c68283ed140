"""Converts recorded vLLM scheduling calls (JSON lines) to an event log (docs/reference/recorded-logs.md).

Each line is an object whose `op` is start, add, grammar, finish, schedule, update, drafts, ended or reset.
"""

import hashlib

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.first_events import started_of
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogWriter
from mmengine.request import Adapter, MediaItem, SamplingParams


def write_log(lines, folder, host="vllm 0.32.0"):
    """Write the log of the recorded `lines` (dicts) to `folder`."""
    _Converter(list(lines), LogWriter(folder, reserve_bytes=0), host).run()


def config_of(start):
    """Return the settings for a recording's first line."""
    return EngineConfig(
        max_num_seqs=start["max_num_seqs"],
        token_budget=start["max_num_batched_tokens"],
        max_model_len=start["max_model_len"],
        block_size=start["block_size"],
        num_blocks=start["num_blocks"],
        enable_prefix_caching=start["caching"],
        policy=start["policy"],
        spec="none",
        draft_policy="all",
        num_draft_tokens=start["num_spec_tokens"],
        lookahead_tokens=start["lookahead"],
        encoder_budget=max(1, start["encoder_compute_budget"]),
        encoder_cache_size=max(1, start["encoder_cache_size"]),
        long_prefill_token_threshold=start["threshold"],
        split_media=not start["disable_chunked_mm_input"],
        admission_reserve="prompt" if start["reserve"] else "none",
        max_loras=start.get("max_loras", 0),
        max_in_flight=2 if start.get("async") else 1,
        max_waiting=2**20,
        max_retries=0,
        compat="vllm",
        log_sync="never",
    )


class _Converter:
    def __init__(self, lines, sink, host):
        self.lines, self.sink, self.host = lines, sink, host
        self.config = config_of(lines[0])
        self.rows, self.free, self.busy = {}, list(range(2 * self.config.max_num_seqs))[::-1], []
        self.step, self.flights, self.media, self.grammars = 0, [], {}, set()

    def emit(self, event, step=None):
        self.sink.append(event, self.step if step is None else step, 0)

    def run(self):
        config = self.config
        self.emit(started_of(config, {}, host=self.host))
        for place, line in enumerate(self.lines):
            following = self.lines[place + 1 : place + 3]
            match line["op"]:
                case "add":
                    self.add(line)
                case "grammar":
                    self.emit(ev.GrammarReady(line["id"]))
                case "finish":
                    for name in line["ids"]:
                        self.emit(ev.Cancelled(name, "cancelled"))
                        self.emit(ev.Finished(name, "abort", "cancelled"))
                        self.leave(name)
                case "reset":
                    self.emit(ev.CacheReset(bool(line.get("preempt"))))
                    for name in line.get("preempted", ()):
                        self.emit(
                            ev.Preempted(name, self.rows[name], "recompute", "the prefix cache was reset")
                        )
                        self.leave(name)
                case "schedule":
                    self.schedule(line)
                case "update":
                    self.update(line, following)
        self.sink.commit()
        self.sink.close()

    def add(self, line):
        asked = line["sampling"]
        media = []
        for name, _, _, offset, length, mask in line["mm"]:
            key = hashlib.sha256(name.encode()).digest()
            media.append(MediaItem(key, "image", runs_of(offset, length, mask), (1, 2, 2 * length)))
        self.media[line["id"]] = media = tuple(media)
        self.emit(
            ev.Queued(
                line["id"],
                np.array(line["prompt"], np.int32).tobytes(),
                SamplingParams(max_tokens=asked["max_tokens"], ignore_eos=asked["ignore_eos"], seed=0),
                media,
                priority=line["priority"],
                cache_salt=line["salt"] or "",
                grammar=None,
                adapter=Adapter(str(line["lora"]).encode(), 1) if line.get("lora") else None,
            )
        )

    def leave(self, name):
        row = self.rows.pop(name, None)
        if row is None:
            return
        if any(row in flight["rows"] for flight in self.flights):
            self.busy.append(row)
        else:
            self.free.append(row)

    def schedule(self, line):
        tokens, drafts = dict(line["sched"]), {name: len(ids) for name, ids in line["spec"].items()}
        for name in line["preempt"]:
            self.emit(ev.Preempted(name, self.rows[name], "recompute", "no free blocks"))
            self.leave(name)
        if line["enc_freed"]:
            self.emit(ev.Evicted(tuple(hashlib.sha256(name.encode()).digest() for name in line["enc_freed"])))
        running = [name for name in tokens if name not in line["admit"]]
        if running or (line["preempt"] and not line["admit"]):
            rows = [self.rows[name] for name in running]
            new = [block for name in running for block in line["blocks"].get(name, [[]])[0]]
            self.emit(
                ev.Scheduled(
                    column(rows),
                    column([tokens[name] for name in running]),
                    column(new),
                    self.encoded(line, running),
                    num_drafts=column([drafts.get(name, 0) for name in running]) if drafts else None,
                )
            )
        for name, computed in ((name, line["admit"][name]) for name in tokens if name in line["admit"]):
            row = self.rows[name] = self.free.pop()
            table = line["blocks"][name][0]
            cached = computed // self.config.block_size
            event = ev.Admitted(
                name,
                row,
                tokens[name],
                column(table[:cached]),
                column(table[cached:]),
                self.encoded(line, [name]),
            )
            self.emit(event)
        names = list(tokens)
        step = {"names": names, "rows": [self.rows[name] for name in names], "step": self.step}
        step["sampled"] = None
        if names or line["preempt"]:
            self.flights.append(step)
            if self.config.max_in_flight > 1 and names:
                self.emit(ev.Dispatched())
                self.step += 1

    def encoded(self, line, names):
        return tuple(
            (self.media[name][index].mm_hash, self.rows[name], index)
            for name in names
            for index in line["enc"].get(name, ())
        )

    def update(self, line, following):
        if not self.flights:
            return
        flight = self.flights.pop(0)
        ended = next((each["ends"] for each in following[:1] if each["op"] == "ended"), {})
        made = next((each for each in following if each["op"] == "drafts"), None)
        made = dict(zip(made["ids"], made["tokens"], strict=True)) if made else {}
        tokens, counts, stops, errors, drafts, num_drafts = [], [], [], [], [], []
        with_drafts = self.config.num_draft_tokens > 0
        names = [name for name in flight["names"] if line["sampled"].get(name)]
        for index, name in enumerate(names):
            taken = line["sampled"][name]
            if "stop" in ended.get(name, "").lower():
                stops.append((index, "eos"))
            if "error" in ended.get(name, "").lower():
                errors.append((index, "grammar"))
            tokens += taken
            counts.append(len(taken))
            ids = [] if name in ended else made.get(name, [])
            drafts += ids
            num_drafts.append(len(ids))
        self.emit(
            ev.Executed(
                column(tokens),
                tuple(stops),
                tuple(errors),
                counts=column(counts) if with_drafts else None,
                drafts=column(drafts),
                num_drafts=column(num_drafts) if with_drafts else None,
            ),
            flight["step"],
        )
        if self.config.max_in_flight == 1:
            self.step += 1
        for row in [row for row in self.busy if not any(row in each["rows"] for each in self.flights)]:
            self.busy.remove(row)
            self.free.append(row)
        for name in [*names, *(ended.keys() - set(names))]:
            if name in ended:
                reason = "length" if "length" in ended[name].lower() else "error"
                reason = "stop" if "stop" in ended[name].lower() else reason
                self.emit(ev.Finished(name, reason))
                self.leave(name)


def runs_of(offset, length, mask):
    if mask is None:
        return ((offset, length),)
    padded = np.diff(np.concatenate(([0], mask, [0])))
    starts, ends = np.flatnonzero(padded == 1), np.flatnonzero(padded == -1)
    return tuple((offset + int(a), int(b - a)) for a, b in zip(starts, ends, strict=True))


def column(values):
    return np.array(values, np.int32).tobytes()
