__shared__ volatile int data;
__shared__ int ready;
if (threadIdx.x == 0) atomicExch(&A[0], 0);
__syncthreads();
if (threadIdx.x == 40) {
  data = 7;
  simulator::publish(&ready);
  atomicExch(&A[0], 1);
} else if (threadIdx.x == 3) {
  simulator::wait_until([&] { return atomicAdd(&A[0], 0) == 1; }, "wait");
  simulator::observe(&ready);
  A[1] = data;
}
