#pragma once
// The simulator has the limit of Hopper.

constexpr int resident_threads = 2048;
