#pragma once
// Kinds of timeline entries, numbered as in cupyfa/lab/analysis/timeline_recorder.py: first phases,
// which start and end, then events without duration.

namespace timeline {
enum Kind : unsigned {
  in_block,        // the whole kernel, from its first line on
  barrier_wait,    // waits for an mbarrier; argument: its address
  named_wait,      // waits for a named barrier; argument: its number
  block_wait,      // waits in __syncthreads
  copy_wait,       // waits for cp.async groups; argument: how many may stay in flight
  product_wait,    // waits for wgmma groups; argument: how many may stay in flight
  store_wait,      // waits for TMA stores
  products,        // products by mma.sync
  issue,           // issues a wgmma group, up to its commit
  softmax,         // computes P from scores, or dS from P and dP
  epilogue,        // divides, rounds and stores results
  loads,           // synchronous loads; argument: bytes per warp
  arithmetic,      // scalar products; argument: multiply-adds per thread
  marked,          // a phase named by mark(); argument: hash of its name
  barrier_arrive,  // arrives at an mbarrier; amount: bytes that it expects
  named_arrive,    // arrives at a named barrier without waiting
  copies_begun,    // commits a cp.async group
  shared_begins,   // argument: address of the block's dynamic shared memory
  placed,          // global clock in nanoseconds; argument: the SM
  worked_wgmma,    // simulator only: wgmma columns of 64 rows and depth 16
  worked_mma,      // simulator only: mma.sync products, in units of m16n8k16
  worked_copies,   // simulator only: bytes of cp.async
  ended = 0x80,    // flag, added to the kind of a phase at its end
};
}  // namespace timeline
