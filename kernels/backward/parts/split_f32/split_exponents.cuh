#pragma once
// The powers of two that scale gradients with split operands, and the range of rows whose weights
// do not overflow or underflow.
//
// dS is stored multiplied by 2^60, so that a small dS times the unit of its row does not underflow.
// Products of gradients are multiplied by
//   Q and dS: 2^46 and the power of K's column    dO and P: 2^46 and that of V's column
//   K and dS: 2^74 over the power of K's column
// after weights are multiplied by the units of their rows: scale2 of split_operands, dO_units.

#include <forward/parts/split_f32/split_pair.cuh>

constexpr int dS_exponent = 60;
constexpr int unit_exponent = dS_exponent - 2 * split_exponent;  // of dO_units, above that of a row
constexpr int key_exponent = unit_exponent + split_exponent;     // of dK and dV, above a column's
constexpr int row_exponent = dS_exponent + split_exponent;       // of dQ
constexpr int largest_row = 55, least_row = -60;                 // exponents of rows of dO
constexpr float least_unit = 0x1p-90f;                           // of a row of Q
constexpr float largest_delta = 0x1p60f;
