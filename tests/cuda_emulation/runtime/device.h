// What the emulated GPU says of itself: an H100's limits, as far as torch, Triton and the engine ask for them.
#pragma once

namespace emulation {

constexpr char kName[] = "NVIDIA H100 80GB HBM3 (emulated)";
constexpr int kVersion = 13000;  // of driver and runtime
constexpr unsigned kMaxGridYZ = 65535, kMaxThreads = 1024, kMaxSharedMemory = 232448;
constexpr int kMaxPitch = 2147483647;

int attribute(int number);  // cudaDeviceAttr and CUdevice_attribute have the same numbers

}  // namespace emulation
