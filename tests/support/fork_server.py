"""A process that has imported what ranks import, and forks them: importing takes seconds, forking does not.

`forked_processes.Fork` starts it with a socket and asks it for processes. Nothing is initialised here and no thread
runs, so a child is what a new process would be that has done the same imports. It goes on behind the loop below: the
program is executed as this one's last line, so that the interpreter ends it as any other, with its atexit handlers, its
exit code and its traceback.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import selectors
import signal
import socket
import struct
import sys
import types

NUMBER = struct.Struct("i")
IMPORTS = ["torch.distributed.device_mesh", "mkernel", "mkernel.net.library", "mkernel.runtime.processes"]
IMPORTS += ["mkernel.ops", "torch.fx.experimental.symbolic_shapes"]  # autograd imports the latter when first used
SIMULATES = importlib.util.find_spec("greenlet") is not None  # tests on a GPU do without the simulator
if SIMULATES:
    IMPORTS.append("mkernel.runtime.cpu_processes")


def import_what_ranks_import():
    for name in IMPORTS:
        importlib.import_module(name)
    if SIMULATES:
        translate_kernels()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork has one of them only"
    gc.collect()
    gc.freeze()  # the collector would write to every page that the children share


def translate_kernels():
    """Have the interpreter translate all portable kernels, as the first launch of each would."""
    from triton.runtime.jit import JITFunction

    from mkernel.sim.interpreter import python_function

    for module in pkgutil.walk_packages(sys.modules["mkernel.ops"].__path__, "mkernel.ops."):
        if module.name.rpartition(".")[2] in ("baselines", "bench", "demo", "tuning", "workload"):
            continue  # for the command line, with what it imports
        for name, value in list(vars(importlib.import_module(module.name)).items()):
            if name.endswith("_kernel") and type(value) is JITFunction:
                python_function(value)


def serve(control):
    """Fork a child for each message, which brings its stdin, stdout, stderr and a socket; the socket is told the
    child's number and, when it has ended, how. In a child it returns that socket, from which the program comes."""
    children = {}  # pidfd -> process, its socket
    with selectors.DefaultSelector() as events:
        events.register(control, selectors.EVENT_READ)
        while True:
            for event, _ in events.select():
                if event.fileobj is not control:
                    events.unregister(event.fd)
                    process, link = children.pop(event.fd)
                    os.close(event.fd)
                    tell(link, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
                    link.close()
                    continue
                _, handles, _, _ = socket.recv_fds(control, 1, 4)
                if not handles:  # whoever started this one has ended
                    for handle in children:
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                    sys.exit()
                link = socket.socket(fileno=handles.pop())
                process = os.fork()
                if not process:
                    os.setsid()
                    for number, handle in enumerate(handles):
                        os.dup2(handle, number)
                    for each in (control, *(other for _, other in children.values())):
                        each.close()
                    for handle in (*handles, *children):
                        os.close(handle)
                    return link
                for handle in handles:
                    os.close(handle)
                handle = os.pidfd_open(process)
                children[handle] = process, link
                events.register(handle, selectors.EVENT_READ)
                tell(link, process)


def tell(link, number):
    with contextlib.suppress(OSError):  # nobody listens any more
        link.sendall(NUMBER.pack(number))


def prepare(link):
    """The program's code and its `__main__`, when everything is as for a process that was started with it."""
    with link, link.makefile() as lines:
        asked = json.loads(lines.readline())
    os.environ.clear()
    os.environ.update(asked["environment"])
    importlib.reload(sys.modules["mkernel.environment"])
    if asked["folder"]:
        os.chdir(asked["folder"])
    main = types.ModuleType("__main__")
    path, *arguments = asked["arguments"]
    if path == "-c":
        source, sys.argv, first, path = arguments[0], ["-c", *arguments[1:]], "", "<string>"
    else:
        with open(path) as file:
            source = file.read()
        sys.argv, first = [path, *arguments], os.path.dirname(os.path.abspath(path))
        main.__file__ = path
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [first, *given, *sys.path[LEADING:]]
    sys.modules["__main__"] = main
    sys.excepthook = lambda kind, error, trace: sys.__excepthook__(
        kind,
        error.with_traceback(trace.tb_next),
        trace.tb_next,  # less this file
    )
    return compile(source, path, "exec", dont_inherit=True), main.__dict__


# what stands before the standard library: this file's folder and those of PYTHONPATH
LEADING = 1 + len([each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each])
import_what_ranks_import()
exec(*prepare(serve(socket.socket(fileno=int(sys.argv[1])))))
