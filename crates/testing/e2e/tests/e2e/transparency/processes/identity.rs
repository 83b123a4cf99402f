//! Runs programs that change what they are: their user, their namespaces, their descriptors.

use super::super::native::same_as_native;
use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG, PATIENCE, succeed},
    process::{Running, kill_dead, missing_any},
    wait::until,
};
use anyhow::{Context as _, ensure};
use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    process::{ChildStdin, ChildStdout, Command, Stdio},
};

/// Starts two processes, calls itself by `exec` once, and waits until it has no children.
const WAITS_FOR_ALL: &str = "
import os, sys
if 'again' not in sys.argv:
    os.spawnvp(os.P_NOWAIT, 'sh', ['sh', '-c', 'true & exec sleep 0.2'])
    os.execvp('python3', ['python3', '-c', sys.orig_argv[2], 'again'])
os.spawnvp(os.P_NOWAIT, 'true', ['true'])
try:
    while True:
        os.wait()
except ChildProcessError:
    print('no children')
";

/// A process may enter a user namespace only while it has one thread.
pub(crate) fn namespaces(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["unshare", "python3"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let kinds = [
        "unshare -U id -u",
        "unshare -Ur --mount --net id -u",
        "unshare --pid --fork sh -c 'echo $$; id -u'",
        "unshare --pid id -u",
        // The first process of a namespace, and one that adopts orphans, which then wait for all.
        "unshare --pid --fork --mount-proc python3 -c \"$0\"",
        "python3 -c \"import ctypes; ctypes.CDLL(None).prctl(36, 1)\n$0\"",
    ];
    for kind in kinds {
        same_as_native(cluster, "64M", &["sh", "-c", kind, WAITS_FOR_ALL])?;
    }
    Ok(Outcome::Passed)
}

/// Prints what others can see of it. At each line that it is told: closes all descriptors; calls
/// another program.
const SHOWS_ITSELF: &str = "
import os, sys
memory = bytearray(60 << 20)
for at in range(0, len(memory), 4096):
    memory[at] = 1
threads = len(os.listdir('/proc/self/task'))
try:
    os.waitpid(-1, 0x40000000)
except ChildProcessError:
    print(os.getpid(), threads, 'thread, no children', flush=True)
sys.stdin.readline()
os.closerange(3, 1 << 20)
for at in range(0, len(memory), 4096):
    memory[at] += 1
print(sum(memory[::4096]), flush=True)
sys.stdin.readline()
os.execvp('python3', ['python3', '-c', 'print(sum(bytearray(60 << 20)))'])
";

/// The helper is no thread or child of its program, and can do nothing but its work. It goes on
/// when the program closes all descriptors, and ends when the program leaves its memory.
pub(crate) fn helper_has_no_rights(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["python3"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let mut program = Talking::start(cluster)?;
    let said = program.line()?;
    let (pid, shown) = said.split_once(' ').context("two words")?;
    ensure!(shown == "1 thread, no children", "it said {said:?}");
    let helper = helper_of(pid)?;
    let status = fs::read_to_string(format!("/proc/{helper}/status"))?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map(str::trim).with_context(|| format!("no {name} in {status}"))
    };
    ensure!(field("Seccomp:")? == "2" && field("NoNewPrivs:")? == "1", "{status}");
    let capabilities = u64::from_str_radix(field("CapPrm:")?, 16)?;
    let (kill, trace) = (1 << 5, 1 << 19);
    ensure!(capabilities & !(kill | trace) == 0, "it may do {capabilities:x}");
    program.tell()?;
    let sum = program.line()?;
    ensure!(sum == (2 * (60 << 20) / 4096).to_string(), "it said {sum:?}");
    program.tell()?;
    let sum = program.line()?;
    ensure!(sum == "0", "the program that it has called said {sum:?}");
    let status = program.running.wait(LONG, || Ok(()))?;
    ensure!(status.success(), "it ended with {status}");
    Ok(Outcome::Passed)
}

/// A program without a helper cannot give up memory, and may lack pages that the helper had in
/// hand.
pub(crate) fn program_ends_with_its_helper(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["python3"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let mut program = Talking::start(cluster)?;
    let said = program.line()?;
    let pid = said.split(' ').next().context("a word")?;
    kill_dead(helper_of(pid)?);
    let status = program.running.wait(LONG, || Ok(()))?;
    ensure!(status.code() == Some(137), "it ended with {status}");
    cluster.wait_until_idle(PATIENCE)?;
    Ok(Outcome::Passed)
}

/// As the first process of a container, `hecaton run` reaps the helpers of processes that have
/// ended.
pub(crate) fn helpers_are_reaped(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["unshare"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let script = "for i in 1 2 3 4 5 6 7 8 9 10; do /bin/true; done; \
                  while grep -qs '^State:.Z' /proc/[0-9]*/status; do sleep 0.05; done; \
                  echo reaped by $PPID";
    let inner = cluster.on_pool("64M", "sh");
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc"]).arg(inner.get_program());
    command.args(inner.get_args()).args(["-c", script]);
    let ended = succeed(&mut command)?;
    ensure!(ended.text() == "reaped by 1\n", "it said {:?}", ended.text());
    Ok(Outcome::Passed)
}

/// The program above, what it says, and what it is told.
struct Talking {
    running: Running,
    said: BufReader<ChildStdout>,
    told: ChildStdin,
}

impl Talking {
    fn start(cluster: &Cluster) -> anyhow::Result<Talking> {
        let mut command = cluster.on_pool("16M", "python3");
        command.args(["-c", SHOWS_ITSELF]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut running = Running::spawn(&mut command)?;
        let said = BufReader::new(running.output()?);
        let told = running.child_mut().stdin.take().context("it is piped")?;
        Ok(Talking { running, said, told })
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.said.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    fn tell(&mut self) -> anyhow::Result<()> {
        Ok(writeln!(self.told)?)
    }
}

/// The process that is called as helpers are, and has the mappings of process `pid`.
fn helper_of(pid: &str) -> anyhow::Result<u32> {
    let first_mapping = |pid: &str| {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
        maps.lines().next().map(str::to_owned)
    };
    let mapping = first_mapping(pid).context("the program is there")?;
    until("the helper of a program is there", PATIENCE, || {
        let processes = fs::read_dir("/proc")?.filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let comm = fs::read_to_string(format!("/proc/{name}/comm")).ok()?;
            (comm == "hecaton\n").then_some(name)
        });
        let mut helpers = processes.filter(|other| first_mapping(other).as_ref() == Some(&mapping));
        let found = helpers.next().and_then(|helper| helper.parse().ok());
        Ok(found.ok_or("no such process is"))
    })
}
