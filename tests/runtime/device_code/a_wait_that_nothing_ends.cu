__shared__ int flag;
if (threadIdx.x == 0) flag = 0;
__syncthreads();
if (threadIdx.x == 0) simulator::publish(&flag);
simulator::wait_until([&] { return s0 == 1; }, "wait_for_flag");
