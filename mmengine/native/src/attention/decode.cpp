// Attention for rows with one query (decode) or a few queries (verification of drafts). Reads K and V once.
//
// A span of kSpan tokens is processed at a time: scores for all heads of all queries, softmax, then weighted sums of
// the values. Spans start at multiples of kSpan, so a query's result does not depend on the division of work or on the
// number of queries.
#include <cstring>

#include "attention/decode_products.h"
#include "attention/job.h"

namespace mm {
namespace {

// One row's working memory. A head here is a q head of one query. The task's heads are ordered by KV head, then by
// query.
template <class T>
struct Row {
  using Query = typename Dot<T>::Query;
  Query* q;  // [heads, q_width], padded with zeros after d
  float* sums;  // [heads, width]
  float* scores;  // [heads, kSpan]
  float* shrink;  // [heads]
  RunningSoftmax* softmax;  // [heads]
  const T *k[kSpan], *v[kSpan];  // the span's tokens
  int* first;  // [queries] the first key that each query sees
  // a query has `own` heads for each KV head; all queries together have `group`
  int queries, heads, own, group, d, value_dim, q_width, width;

  Row(Carver& carver, const AttentionCall& call, int queries, int kv_heads)
      : queries(queries), own(call.group()), d(call.step->head_dim), value_dim(call.rules.value_dim) {
    group = queries * own, heads = kv_heads * group;
    q_width = (int)round_up(d, Dot<T>::kStep), width = (int)round_up(value_dim, 16);
    q = carver.take<Query>((int64_t)heads * q_width);
    sums = carver.take<float>((int64_t)heads * width);
    scores = carver.take<float>((int64_t)heads * kSpan);
    shrink = carver.take<float>(heads);
    softmax = carver.take<RunningSoftmax>(heads);
    first = carver.take<int>(queries);
  }

  int query_of(int head) const { return head % group / own; }

  // The index of a head within its query.
  int head_of(int head) const { return head / group * own + head % own; }

  // The offset of a head's values in q and in the result.
  int64_t place(int head, int64_t stride) const { return query_of(head) * stride + (int64_t)head_of(head) * d; }

  // Returns the index, counted from `at`, of the first token that the row sees in the span at `at`, rounded down to a
  // multiple of kTokens.
  int first_place(int at) const { return first[0] > at ? (first[0] - at) / kTokens * kTokens : 0; }

  // Sets `k` to the keys of the span that starts at `at`, and returns the span's number of tokens. `k` is padded at
  // both ends to whole groups of kTokens.
  int find(const T* kv, const Places& places, int at, int kv_len) {
    const int count = kv_len - at < kSpan ? kv_len - at : kSpan, skip = first[0] - at;
    for (int t = first_place(at); t < round_up(count, kTokens); t++)  // the padding repeats the nearest token
      k[t] = kv + places.of(at + (t < skip ? skip : t < count ? t : count - 1));
    return count;
  }
};

// Computes the scores of the span's tokens [from, count), while `ahead` prefetches the span's values.
template <class T>
void score_span(Row<T>& row, int from, int count, Ahead<T> ahead) {
  const int lines = (int)round_up(kTokens * row.d * (int64_t)sizeof(T), 64) / 64;
  for (int t = from; t < count; t += kTokens) {
    for (int head = 0; head < row.heads;) {
      const int64_t kv = (int64_t)(head / row.group) * row.d;
      const int taken = head % row.group, left = row.group - taken, n = left < kHeads ? left : kHeads;
      if (!taken) ahead.ask(lines);
      const auto* q = row.q + (int64_t)head * row.q_width;
      const auto run = n >= 4 ? score<kHeads, T> : n == 3 ? score<kHeads - 1, T> : n == 2 ? score<2, T> : score<1, T>;
      run(row.k + t, kv, q, row.q_width, row.d, row.scores + head * kSpan + t);
      head += n;
    }
  }
}

// Adds the weighted values of the span's tokens [from, count), while `ahead` prefetches the next span's keys.
template <class T>
void mix_span(Row<T>& row, int from, int count, Ahead<T> ahead) {
  const int most = row.group < kHeads ? row.group : kHeads, at_once = values_at_once(most), d = row.value_dim;
  const int passes = (row.group + most - 1) / most * ((d + at_once - 1) / at_once);  // over a KV head's tokens
  const int lines = ((int)(row.d * sizeof(T) + 63) / 64 + passes - 1) / passes;
  for (int head = 0; head < row.heads;) {
    const int64_t kv = (int64_t)(head / row.group) * row.d;
    const int left = row.group - head % row.group, n = left < kHeads ? left : kHeads;
    const auto run = n >= 4   ? mix_heads<kHeads, T>
                     : n == 3 ? mix_heads<kHeads - 1, T>
                     : n == 2 ? mix_heads<2, T>
                              : mix_heads<1, T>;
    run(row.v + from, kv, d, count - from, row.scores + head * kSpan + from, row.shrink + head,
        row.sums + (int64_t)head * row.width, row.width, ahead, lines);
    head += n;
  }
}

MM_INLINE void put(float* to, float value) { *to = value; }
MM_INLINE void put(uint16_t* to, float value) { *to = to_bf16(value); }

// Turns the scores of the span at `at` into softmax weights. A token that a query does not see gets 0.
template <class T>
void soften_span(Row<T>& row, const AttentionRules& rules, int at, int tokens, int kv_len) {
  for (int head = 0; head < row.heads; head++) {
    float* scores = row.scores + head * kSpan;
    const int query = row.query_of(head), seen = kv_len - (row.queries - 1 - query) - at;
    row.shrink[head] = weigh(scores, 0, row.first[query] - at, seen, tokens, 1, rules.scoring, row.softmax[head],
                             !rules.sinks && at <= row.first[query],
                             [=](int i, f16v weight) { store_as(scores + i, weight); });
  }
}

template <class T>
void decode(const AttentionCall& call, const AttentionTask& task, void* scratch) {
  const mm_attention_step& step = *call.step;
  const AttentionRules& rules = call.rules;
  Carver carver = {(char*)scratch};
  Row<T> row(carver, call, task.query1 - task.query0, task.head1 - task.head0);
  const int d = row.d, kv_len = step.kv_lens[task.row];
  const int64_t token = step.query_starts[task.row], first = (int64_t)task.head0 * row.own * d;
  const T* q = (const T*)call.q + token * call.q_stride + first;
  for (int query = 0; query < row.queries; query++)
    row.first[query] = rules.first_key(kv_len - row.queries + query);
  for (int head = 0; head < row.heads; head++) {
    for (int i = 0; i < row.q_width; i++)
      row.q[(int64_t)head * row.q_width + i] =
          Dot<T>::keep(i < d ? as_float(q[row.place(head, call.q_stride) + i]) : 0);
    if (rules.sinks)
      row.softmax[head] = {rules.sinks[task.head0 * row.own + row.head_of(head)] / rules.scoring.factor(), 1.0f};
  }
  memset(row.sums, 0, (int64_t)row.heads * row.width * sizeof(float));
  const Places places(step, task.row);
  const T* kv = (const T*)call.kv + (int64_t)task.head0 * d;
  const int64_t bytes = (int64_t)(task.head1 - task.head0) * d * sizeof(T);  // bytes of a token's keys
  const int start = row.first[0] / kSpan * kSpan;
  int count = row.find(kv, places, start, kv_len);
  for (int at = start; at < kv_len; at += kSpan) {
    const int tokens = count, from = row.first_place(at);
    for (int t = from; t < round_up(tokens, kTokens); t++) row.v[t] = row.k[t] + places.v_offset;
    score_span(row, from, tokens, Ahead<T>{row.v + from, tokens - from, bytes});
    soften_span(row, rules, at, tokens, kv_len);
    count = row.find(kv, places, at + kSpan, kv_len);
    mix_span(row, from, tokens, Ahead<T>{row.k, count, bytes});
  }
  T* out = (T*)call.out + token * call.out_stride + first;
  for (int head = 0; head < row.heads; head++) {
    T* to = out + row.place(head, call.out_stride);
    for (int i = 0; i < row.value_dim; i++)
      put(to + i, row.sums[(int64_t)head * row.width + i] / row.softmax[head].total);
    for (int i = row.value_dim; i < d; i++) to[i] = 0;
  }
}

}  // namespace

int64_t decode_scratch_bytes(const AttentionCall& call, int queries) {
  Carver carver = {nullptr};
  Row<float> row(carver, call, queries, call.step->num_kv_heads);  // float is the widest type
  return carver.used;
}

void attention_decode(const AttentionCall& call, const AttentionTask& task, void* scratch) {
  (call.step->dtype == 0 ? decode<float> : decode<uint16_t>)(call, task, scratch);
}

}  // namespace mm
