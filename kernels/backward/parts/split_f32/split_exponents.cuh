#pragma once
// Powers of two that scale gradients with split operands, and the range of exponents for which the
// weights of a row neither overflow nor underflow.
//
// dS is stored times 2^60, so that a small dS times the unit of its row does not underflow. For dK
// and dV, weights are also multiplied by the units of their rows (scale2 of split_operands, and
// dO_units). With e the exponent of a column of K or V, accumulators are then too large by
//   dK, dV: 2^(46 + e)    dQ: 2^(74 - e)

#include <forward/parts/split_f32/split_pair.cuh>

constexpr int dS_exponent = 60;
constexpr int unit_exponent = dS_exponent - 2 * split_exponent;  // dO_units: 2^(32 + row exponent)
constexpr int key_exponent = unit_exponent + split_exponent;     // dK, dV: too large by 2^(46 + e)
constexpr int row_exponent = dS_exponent + split_exponent;       // dQ: too large by 2^(74 - e)
constexpr int largest_row = 55, least_row = -60;                 // limits of dO row exponents
constexpr float least_unit = 0x1p-90f;                           // smallest unit of a Q row
constexpr float largest_delta = 0x1p60f;
