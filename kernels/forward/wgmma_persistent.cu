// wgmma_persistent: `wgmma_overlap`, whose blocks stay and go from one row tile to the next.
//
// There is a block for each multiprocessor. Its producer loads the next row tile's Q, K and V while
// the last one's weights are computed, and its consumers begin the next scores before they store O.
// So the tensor cores wait neither for a block's beginning nor for its end.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   grid (min(multiprocessors, cdiv(M, Br) * heads * batch))    block (128 + 2 * Br)
//   the host sets: scalar, operand, real, Br, Bc, Wr, stages, Q_stages, pack_gqa, d, dv, causal,
//   windowed, threads, shared_bytes
#include <forward/parts/consumers.cuh>
#include <attention/mask.cuh>
#include <attention/nonfinite.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <forward/parts/ping_pong.cuh>

// Of one warpgroup, for which the next rows come while others still need their last ones.
using OwnQueries = TmaTile<operand, warpgroup_rows, d>;

struct Shared {
  OwnQueries Q[Q_stages][consumers];
  Keys K[stages];
  Values V[stages];
  Barrier Q_full[Q_stages][consumers], Q_empty[Q_stages][consumers];
  Barrier K_full[stages], V_full[stages], K_empty[stages], V_empty[stages];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

__device__ __forceinline__ void make_barriers(Shared& shared) {
  for (int i = 0; i < Q_stages; ++i)
    for (int w = 0; w < consumers; ++w) {
      init_barrier(shared.Q_full[i][w], 1);
      init_barrier(shared.Q_empty[i][w], 1);
    }
  for (int i = 0; i < stages; ++i) {
    init_barrier(shared.K_full[i], 1);
    init_barrier(shared.V_full[i], 1);
    init_barrier(shared.K_empty[i], consumers);
    init_barrier(shared.V_empty[i], consumers);
  }
  fence_barrier_init();
}

// One row tile of a head, and the keys that it goes through.
struct Task {
  int row, head, batch, start, end;
};

// The tasks of a block, dealt out in rounds. With a causal mask, whose tasks differ, as many heads
// go together as make two rounds, the longest rows of all of them first; the second round is dealt
// from the last block to the first, which makes up for that. So all blocks have about the same to
// do, and heads whose K and V are in the cache are done with before others come.
struct Schedule {
  int M, N, heads, all_heads, causal_offset, window_offset, first = 0, round = 0, seat = blockIdx.x;

  __device__ __forceinline__ bool next(Task& task) {
    const int tiles = cdiv(M, Br), blocks = gridDim.x;
    const int together = causal ? max(1, 2 * blocks / tiles) : all_heads;
    for (; first < all_heads; first += together, round = 0) {
      const int size = min(together, all_heads - first), count = size * tiles;
      const int index = round * blocks + (round % 2 ? blocks - 1 - seat : seat);
      round += 1;
      if (index < count) {
        const int tile = causal ? tiles - 1 - index / size : index % tiles;
        const int head = first + (causal ? index % size : index / tiles), row = tile * Br;
        // There is a tile for every task; where there are no keys, it is one of zeros beyond them.
        const int start = N == 0 ? 1 : kv_begin(row, N, window_offset) / Bc * Bc;
        const int end = kv_end(min(row + Br, M) - 1, N, causal_offset);
        task = {row, head % heads, head / heads, start, max(end, start + 1)};
        return true;
      }
      // Those who had one task less begin with the next heads.
      const int left = count % blocks;
      seat = (seat + (cdiv(count, blocks) % 2 ? blocks - left : left)) % blocks;
    }
    return false;
  }
};

// What the producer's one thread does: the tiles of one task after those of another.
__device__ __forceinline__ void produce(Shared& shared, Schedule schedule, const TensorMap& Q,
                                        const TensorMap& K, const TensorMap& V, int group) {
  PipelineState<Q_stages> own;
  PipelineState<stages> turn;
  for (Task task; schedule.next(task); own.advance()) {
    const int kv_head = task.head / group;
    const auto load_queries = [&] {
#pragma unroll
      for (int w = 0; w < consumers; ++w) {
        wait(shared.Q_empty[own.stage][w], own.phase ^ 1);
        load_async(shared.Q[own.stage][w], Q, shared.Q_full[own.stage][w],
                   task.row + w * warpgroup_rows, task.head, task.batch);
      }
    };
    if (Q_stages > 1) load_queries();
    for (int first_key = task.start; first_key < task.end; first_key += Bc, turn.advance()) {
      const int i = turn.stage;
      wait(shared.K_empty[i], turn.phase ^ 1);
      load_async(shared.K[i], K, shared.K_full[i], first_key, kv_head, task.batch);
      // A single buffer is free only after the last task's scores, keys have room before that.
      if (Q_stages == 1 && first_key == task.start) load_queries();
      wait(shared.V_empty[i], turn.phase ^ 1);
      load_async(shared.V[i], V, shared.V_full[i], first_key, kv_head, task.batch);
    }
  }
}

// What a warpgroup of consumers goes through: the tiles of all its tasks, one after the other.
struct Consumer {
  Shared& shared;
  Schedule schedule;
  int warpgroup, lane, own_row, M;
  float scale;
  Rows<step> rows;
  Fragments<step, width> O;
  Fragments<step, Bc> S;
  Weights P;
  PipelineState<Q_stages> own;
  PipelineState<stages> keys, values;
  bool added = false;

  __device__ __forceinline__ Consumer(Shared& shared, const Schedule& schedule, int warpgroup,
                                      int M, float scale)
      : shared(shared),
        schedule(schedule),
        warpgroup(warpgroup),
        lane(threadIdx.x % warp_size),
        own_row(threadIdx.x / warp_size * step - warpgroup_rows),
        M(M),
        scale(scale),
        rows(0, {}, 0) {}

  __device__ __forceinline__ bool leads() const { return threadIdx.x % warpgroup_size == 0; }
  __device__ __forceinline__ Rows<step> rows_of(const Task& task) const {
    return Rows<step>(task.row + own_row + lane / 4,
                      Extent{M, schedule.N, schedule.causal_offset, schedule.window_offset},
                      log2e * (scale == 0 ? 1.0f : fabs(scale)));
  }
  // Whether some row of the task does not see all keys of a tile.
  __device__ __forceinline__ bool is_masked(const Task& task, int first_key) const {
    return first_key + Bc > kv_end(task.row, schedule.N, schedule.causal_offset) ||
           first_key < kv_begin(min(task.row + Br, M) - 1, schedule.N, schedule.window_offset);
  }
  // Where the keys end that some row of the warpgroup sees; those of the others may go on. A tile
  // is gone through in any case. Those left out fit into the buffers but one: in that is the V of
  // the warpgroup's last tile, which it gives back only when the next Q has come.
  __device__ __forceinline__ int own_end(const Task& task) const {
    if constexpr (!causal) return task.end;
    const int last_row = min(task.row + (warpgroup + 1) * warpgroup_rows, M) - 1;
    const int visible = kv_end(last_row, schedule.N, schedule.causal_offset);
    return max(max(visible, task.end - (stages - 1) * Bc), task.start + 1);
  }
  __device__ __forceinline__ void await_queries(PipelineState<Q_stages> own) const {
    wait(shared.Q_full[own.stage][warpgroup], own.phase);
    if (scale <= 0) apply_sign(shared.Q[own.stage][warpgroup], 0, scale, warpgroup);
  }

  // S becomes P, an operand of O += P V. Returns whether O has to be multiplied by the factors.
  __device__ __forceinline__ bool weigh(const Task& task, int first_key, float (&factor)[1][2]) {
    const bool risen = is_masked(task, first_key)
                           ? raise_maxima<true, slack>(S, rows, first_key, lane, factor)
                           : raise_maxima<false, slack>(S, rows, first_key, lane, factor);
    rows.scale(factor);
    exponentiate(S, rows);
    return risen;
  }
  __device__ __forceinline__ void release_keys() {
    if (leads()) arrive(shared.K_empty[keys.stage]);
    keys.advance();
  }
  __device__ __forceinline__ void release_values() {
    if (leads()) arrive(shared.V_empty[values.stage]);
    values.advance();
  }
  __device__ __forceinline__ void await_keys() const {
    wait(shared.K_full[keys.stage], keys.phase);
  }
  __device__ __forceinline__ void await_values() const {
    wait(shared.V_full[values.stage], values.phase);
  }
  __device__ __forceinline__ void begin_scores() {
    await_keys();
    await_turn(warpgroup);
    ::begin_scores(shared.Q[own.stage][warpgroup], shared.K[keys.stage], S, 0);
  }
  __device__ __forceinline__ void begin_output() {
    await_values();
    ::begin_output(shared.V[values.stage], P, O, added);
  }

  // Gives back tiles of which the warpgroup sees no key.
  __device__ __forceinline__ void leave_keys() {
    await_keys();
    await_turn(warpgroup);
    pass_turn(warpgroup);
    release_keys();
  }
  __device__ __forceinline__ void leave_values(int tiles) {
    for (; tiles > 0; --tiles) {
      await_values();
      barrier_sync(1 + warpgroup, warpgroup_size);  // a thread that saw no V come could miss it
      release_values();
    }
  }

  // The scores of the next tile and O += P V of the tile before. While the warpgroup computes
  // weights, the tensor cores work on that, and for others.
  __device__ __forceinline__ void advance(const Task& task, int first_key) {
    float factor[1][2];
    begin_scores();
    begin_output();
    pass_turn(warpgroup);
    wgmma_wait_group<1>(flat(S));
    release_keys();
    const bool risen = weigh(task, first_key, factor);
    wgmma_wait_group<0>(flat(O));
    release_values();
    pack_weights(S, P);
    if (risen) scale_rows(O, factor);
    added = true;
  }

  // The same from one task to the next, whose first scores are computed while O is stored.
  template <class Finish>
  __device__ __forceinline__ void advance(const Task& task, const Task& next, int left,
                                          Finish finish) {
    float factor[1][2];
    begin_output();
    own.advance();
    await_queries(own);
    begin_scores();
    pass_turn(warpgroup);
    wgmma_wait_group<1>(flat(O));
    release_values();
    leave_values(left);
    finish(O, rows, task);
    rows = rows_of(next);
    wgmma_wait_group<0>(flat(S));
    release_keys();
    weigh(next, next.start, factor);
    pack_weights(S, P);
    added = false;
  }

  template <class Finish>
  __device__ __forceinline__ void run(Finish finish) {
    Task task, next;
    if (!schedule.next(task)) return;
    float factor[1][2];
    rows = rows_of(task);
    await_queries(own);
    if (warpgroup == 0) pass_turn(consumers - 1);
    begin_scores();
    pass_turn(warpgroup);
    wgmma_wait_group<0>(flat(S));
    release_keys();
    weigh(task, task.start, factor);
    pack_weights(S, P);
    for (;;) {
      const int end = own_end(task);
      int first_key = task.start + Bc, left = 0;
      for (; first_key < end; first_key += Bc) advance(task, first_key);
      if (leads()) arrive(shared.Q_empty[own.stage][warpgroup]);
      for (; first_key < task.end; first_key += Bc, ++left) leave_keys();
      if (!schedule.next(next)) break;
      advance(task, next, left, finish);
      task = next;
    }
    begin_output();
    wgmma_wait_group<0>(flat(O));
    release_values();  // for the producer to end
    finish(O, rows, task);
  }
};

extern "C" __global__ __launch_bounds__(threads, 1) void wgmma_persistent(
    const __grid_constant__ TensorMap Q_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, Tensor<const operand> Q, Tensor<const operand> K,
    Tensor<const operand> V, Tensor<scalar> O, Tensor<real> lse, int M, int N, int heads, int group,
    int causal_offset, int window_offset, real scale, int batch) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) make_barriers(shared);
  __syncthreads();
  const Schedule schedule = {M, N, heads, heads * batch, causal_offset, window_offset};
  const int warpgroup = warp_uniform(threadIdx.x / warpgroup_size) - 1;
  if (warpgroup < 0) {
    give_to_consumers();
    if (threadIdx.x < warp_size && elect_one())
      produce(shared, schedule, Q_map, K_map, V_map, group);
    return;
  }
  take_from_producer();
  const int lane = threadIdx.x % warp_size;
  Consumer consumer(shared, schedule, warpgroup, M, scale);
  consumer.run([&](Fragments<step, width>& sums, const Rows<step>& rows, const Task& task) {
    finish_rows(sums, rows, lse, task.batch, task.head, lane);
    if (has_mask && has_nonfinite(sums))
      recompute_rows(Q, K, V, O, rows, task.batch, task.head, task.head / group, M, scale);
    else
      store_pieces(sums, rows, O, task.batch, task.head, M, lane);
  });
}
