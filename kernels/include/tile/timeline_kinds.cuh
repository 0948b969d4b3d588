#pragma once
// The kinds of entries of a timeline, numbered as in cupyfa/lab/analysis/timeline_recorder.py:
// phases, which begin and end, then momentary events.

namespace timeline {
enum Kind : unsigned {
  in_block,        // from the kernel's first line to its end
  barrier_wait,    // for a barrier in shared memory, by its address
  named_wait,      // for a named barrier, by its number
  block_wait,      // in __syncthreads
  copy_wait,       // for groups of cp.async; the argument: how many may stay pending
  product_wait,    // for groups of wgmma, with the same argument
  store_wait,      // for bulk stores
  products,        // mma.sync
  issue,           // of a group of wgmma, to its commit
  softmax,         // scores become P, or P and dP become dS
  epilogue,        // results are divided, rounded and stored
  loads,           // synchronous ones; the argument is how many bytes a warp loads
  arithmetic,      // products without tensor cores; the argument is a thread's multiply-adds
  marked,          // a phase that the kernel names; the argument is the hash of its name
  barrier_arrive,  // at a barrier in shared memory; the amount is how many bytes it expects
  named_arrive,    // at a named barrier, without waiting
  copies_begun,    // a group of cp.async ends
  shared_begins,   // the address of the block's dynamic shared memory
  placed,          // the clock is the device's, in nanoseconds; the argument is the multiprocessor
  worked_wgmma,    // counted by the simulator: columns of wgmma, of 64 rows and a depth of 16 each
  worked_mma,      // products of mma.sync, as the 16x8x16 of 16-bit numbers
  worked_copies,   // bytes of cp.async
  ended = 0x80,    // added to the number of a phase that ends
};
}  // namespace timeline
