// What real backends promise, from their sources (ggml/src of llama.cpp as in llama-cpp-python
// 0.3.36). ggml's interface leaves these points open, and programs come to depend on one answer.
#pragma once

#include "log.hpp"

struct Contract {
    const char * name;
    enum Peer { NONE, ON_SOURCE, HANDSHAKE, ON_TARGET } peer; // copies between devices, see `copy_between`
    enum Pageable { AT_CALL, WAITS, IN_FLIGHT } get, set;     // asynchronous copies with pageable memory
    bool buffer_waits; // whether a buffer's get and set come after what is enqueued on its device
    bool events;
    enum Wait { STREAM, HOST, NOBODY } wait; // who stops in event_wait
    bool pinned; // whether there is a host buffer type
    bool free_waits; // whether freeing a device's buffer comes after what is enqueued on that device
};

constexpr Contract CONTRACTS[] = {
    // ggml-cuda.cu, ggml_backend_cuda_cpy_tensor_async: copied on the source's stream, then the
    // destination waits. ..._buffer_get_tensor, ..._set_tensor, ..._clear: on the calling thread's
    // own stream, which waits for nobody. cudaMemcpyAsync with pageable memory: staged before it returns, or complete.
    // cudaFree waits for its own device, as drivers do (we know of no written promise); of
    // cudaFreeHost nothing is taken for granted.
    { "cuda", Contract::ON_SOURCE, Contract::WAITS, Contract::AT_CALL, false, true, Contract::STREAM, true, true },
    // The same built with GGML_CUDA_NO_PEER_COPY: no copies between devices, and no events.
    { "cuda-no-peer", Contract::NONE, Contract::WAITS, Contract::AT_CALL, false, false, Contract::STREAM, true, true },
    // ggml-vulkan.cpp, ggml_backend_vk_cpy_tensor_async refuses another device; ..._2d_async with
    // pageable memory ends in ggml_vk_synchronize; ggml-vulkan-buffers.cpp: buffers of a discrete GPU
    // are read, written and cleared on a transfer queue of their own. freeMemory waits for nobody.
    { "vulkan", Contract::NONE, Contract::WAITS, Contract::WAITS, false, true, Contract::STREAM, true, false },
    // ggml-metal-context.m, ggml_metal_cpy_tensor_async: the source waits for the destination,
    // copies, and the destination waits. ggml_metal_get_tensor_async wraps the program's memory and
    // returns; ..._set_tensor_async copies at the call; shared buffers are read by memcpy. Command
    // buffers do not retain what they use (commandBufferWithUnretainedReferences): a free waits for nobody.
    { "metal", Contract::HANDSHAKE, Contract::IN_FLIGHT, Contract::AT_CALL, false, true, Contract::STREAM, false, false },
    // ggml-sycl.cpp: cpy_tensor_async is not set; memcpy on the stream with the program's pointer;
    // buffers are read on the device's default queue, which is the stream (common.hpp); event_wait
    // makes the host wait. sycl::free and zeMemFree wait for nobody.
    { "sycl", Contract::NONE, Contract::IN_FLIGHT, Contract::IN_FLIGHT, true, true, Contract::HOST, true, false },
    // ggml-rpc.cpp: one message queue a server, so whatever a buffer is asked comes after what was
    // sent, its end too; send_async with an output writes the program's memory later; no copies between servers;
    // event_wait does nothing.
    { "rpc", Contract::NONE, Contract::IN_FLIGHT, Contract::AT_CALL, true, true, Contract::NOBODY, false, true },
    // Nobody's: a copy runs on the destination's stream once the source's work is done.
    { "on-target", Contract::ON_TARGET, Contract::WAITS, Contract::AT_CALL, false, true, Contract::STREAM, true, true },
};

inline const Contract & contract() {
    static const Contract & chosen = []() -> const Contract & {
        const char * name = setting("GGRAPH_RECORD_CONTRACT", "cuda");
        for (auto & c : CONTRACTS) if (!strcmp(c.name, name)) return c;
        fprintf(stderr, "ggraph: GGRAPH_RECORD_CONTRACT=%s is no contract\n", name);
        abort();
    }();
    return chosen;
}
