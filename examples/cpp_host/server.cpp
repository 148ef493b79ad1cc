// A server over a Unix socket: server model.fxw SOCKET [THREADS]
//
// A request is 8 floats, the answer 3. Each connection may send any number of requests. The threads share one model, whose
// weights SIGHUP replaces by those in model.safetensors, if there is that file: requests that run keep the old ones.
#include <fxwrap/dlpack.h>
#include <fxwrap/fxwrap.hpp>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

constexpr size_t input_size = 8, output_size = 3;

bool receive(int connection, void* target, size_t size) {
  return recv(connection, target, size, MSG_WAITALL) == ssize_t(size);
}

void answer(const fxwrap::Model& model, int connection) {
  float numbers[input_size];
  int64_t sizes[2] = {1, input_size};
  while (receive(connection, numbers, sizeof numbers)) {
    DLManagedTensorVersioned batch{};
    batch.version = {1, 0};
    batch.dl_tensor = {numbers, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, sizes, nullptr, 0};
    std::vector<fxwrap::Value> inputs;
    inputs.emplace_back(&batch);
    const std::vector<fxwrap::Value> results = model.run(std::move(inputs));
    const DLTensor& classes = results[0].dlpack()->dl_tensor;
    if (send(connection, classes.data, output_size * sizeof(float), MSG_NOSIGNAL) < 0) break;
  }
}

void serve(const fxwrap::Model& model, int listener) {
  for (int connection; (connection = accept(listener, nullptr, nullptr)) >= 0; close(connection)) {
    try {
      answer(model, connection);
    } catch (const fxwrap::Error& error) {
      std::fprintf(stderr, "%s: %s\n", error.kind().c_str(), error.what());
    }
  }
}

int listen_at(const char* path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path, sizeof address.sun_path - 1);
  unlink(path);
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || listen(listener, 64) != 0) {
    std::perror(path);
    std::exit(1);
  }
  return listener;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) return std::puts("usage: server model.fxw SOCKET [THREADS]"), 2;
  sigset_t reload;
  sigemptyset(&reload);
  sigaddset(&reload, SIGHUP);
  sigaddset(&reload, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &reload, nullptr);  // for all threads: only sigwait receives them
  try {
    const std::string path = arguments[1];
    FxwrapOpenOptions options{};
    options.threads = 1;  // requests are parallel, not operators
    fxwrap::Model model(path, options);
    const int listener = listen_at(arguments[2]);
    for (int i = count > 3 ? std::atoi(arguments[3]) : 4; i > 0; --i) {
      std::thread([&model, listener] { serve(model, listener); }).detach();
    }
    std::printf("serving %s\n", model.name().c_str());
    std::fflush(stdout);
    for (int signal = 0; sigwait(&reload, &signal) == 0 && signal == SIGHUP;) {
      try {
        model.load_constants(path.substr(0, path.rfind('.')) + ".safetensors");
        std::puts("replaced the weights");
      } catch (const fxwrap::Error& error) {
        std::printf("%s: %s\n", error.kind().c_str(), error.what());
      }
      std::fflush(stdout);
    }
    std::_Exit(0);
  } catch (const fxwrap::Error& error) {
    std::printf("%s: %s\n", error.kind().c_str(), error.what());
    return 1;
  }
}
