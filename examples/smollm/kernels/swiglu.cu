// swiglu: y = silu(gate) * up, where a row of gate_up has the gates first.
//
//   gate_up [rows, 2 inner], y [rows, inner]
//   grid (cdiv(inner, threads), rows)    block (threads)
extern "C" __global__ void swiglu(const scalar* gate_up, scalar* y, int inner) {
  const int k = blockIdx.x * blockDim.x + threadIdx.x;
  if (k >= inner) return;
  gate_up += 2LL * blockIdx.y * inner;
  const float gate = number(gate_up[k]), up = number(gate_up[inner + k]);
  store(y + (long long)blockIdx.y * inner + k, gate / (1 + expf(-gate)) * up);
}
