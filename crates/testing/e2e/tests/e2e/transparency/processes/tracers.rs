//! Runs tracers on the pool, together with the programs that they trace.

use super::super::native::same_as_native;
use crate::harness::{Outcome, TestResult, cluster::Cluster, process::missing_any};
use anyhow::Context as _;

/// More memory than is local, in the traced process; it also starts another.
const SCRIPT: &str = "
import subprocess
size = 60 << 20
memory = bytearray(size)
for at in range(0, size, 4096):
    memory[at:at + 8] = at.to_bytes(8, 'little')
assert all(memory[at:at + 8] == at.to_bytes(8, 'little') for at in range(0, size, 4096))
print(subprocess.run(['echo', 'verified'], capture_output=True).stdout)
";

/// Starts a process, attaches strace to it, stops it, and uses as much memory itself.
const ATTACHING: &str = r#"
import os, subprocess, sys
TRACED = '
'.join([
    'import os, sys',
    'memory = bytearray(40 << 20)',
    'places = range(0, len(memory), 4096)',
    'for at in places: memory[at:at + 8] = at.to_bytes(8, "little")',
    'os.write(int(sys.argv[1]), b"x")',
    'sys.stdin.read()',
    'assert all(memory[at:at + 8] == at.to_bytes(8, "little") for at in places)',
])
read, write = os.pipe()
command = [sys.executable, '-c', TRACED, str(write)]
traced = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[write])
os.read(read, 1)
command = ['strace', '-f', '-o', sys.argv[1], '-p', str(traced.pid)]
tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
assert 'attached' in tracer.stderr.readline()
os.kill(traced.pid, 19)
memory = bytearray(40 << 20)
for at in range(0, len(memory), 4096):
    memory[at] = 1
os.kill(traced.pid, 18)
traced.communicate(b'')
print(traced.wait(), tracer.wait(), sum(memory[::4096]), flush=True)
"#;

/// A tracer that is given a process's number does not get hold of what serves its memory: the two
/// have more together than is local.
pub(crate) fn strace_attaches(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["strace", "python3"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let trace = cluster.file("trace");
    let trace = trace.to_str().context("a path of letters")?;
    same_as_native(cluster, "24M", &["python3", "-c", ATTACHING, trace])?;
    Ok(Outcome::Passed)
}

/// strace waits for pages of its own while the program that it traces stands still.
pub(crate) fn strace_follows(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["strace", "python3"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let trace = cluster.file("trace");
    let trace = trace.to_str().context("a path of letters")?;
    let command = ["strace", "-f", "-o", trace, "python3", "-c", SCRIPT];
    same_as_native(cluster, "16M", &command)?;
    Ok(Outcome::Passed)
}

/// Reads all memory of another process as debuggers do.
const READING: &str = r#"
import os, subprocess, sys
READ = '\n'.join([
    'import ctypes, sys',
    'memory = bytearray(40 << 20)',
    'for at in range(0, len(memory), 4096): memory[at:at + 8] = at.to_bytes(8, "little")',
    'print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)',
    'sys.stdin.read()',
])
child = subprocess.Popen([sys.executable, '-c', READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
start = int(child.stdout.readline())
memory = os.open(f'/proc/{child.pid}/mem', os.O_RDONLY)
wrong = 0
for at in range(0, 40 << 20, 1 << 20):
    read = os.pread(memory, 1 << 20, start + at)
    pages = range(0, 1 << 20, 4096)
    wrong += sum(read[page:page + 8] != (at + page).to_bytes(8, 'little') for page in pages)
child.communicate(b'')
print(wrong, 'wrong', child.wait(), flush=True)
"#;

/// A debugger on the pool finds what its programs have in the pool.
pub(crate) fn debuggers_read(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["python3"]) {
        return Ok(Outcome::Skipped(reason));
    }
    same_as_native(cluster, "16M", &["python3", "-c", READING])?;
    Ok(Outcome::Passed)
}

/// Under valgrind the program does not share memory with others as the kernel would have it.
pub(crate) fn valgrind_runs(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["valgrind", "python3"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let command = ["valgrind", "-q", "python3", "-c", "print(len(bytearray(100 << 20)))"];
    same_as_native(cluster, "64M", &command)?;
    Ok(Outcome::Passed)
}
