// Memory of a thread, kept for the next call: giving it back to the system would cost page faults every time.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace nanovllm {

class Scratch {
  public:
    uint32_t* words(int64_t count) {
        if (count > count_) {
            data_.reset();  // first, so that the two are never held together
            count_ = 0;
            data_.reset(static_cast<uint32_t*>(::operator new[](size_t(count) * 4, std::align_val_t(64))));
            count_ = count;
        }
        return data_.get();
    }

  private:
    struct Free {
        void operator()(uint32_t* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    std::unique_ptr<uint32_t, Free> data_;
    int64_t count_ = 0;
};

}  // namespace nanovllm
