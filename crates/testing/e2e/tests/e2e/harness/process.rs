//! Processes of the tests: none outlives its test, none is waited for without end.

use super::wait::until_every;
use anyhow::{Context as _, ensure};
use hecaton_testkit::wait_until_stopped;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::{
    fmt, fs,
    io::Read,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::Path,
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

const TICK: Duration = Duration::from_millis(5);

/// Exit status and output of a process that has ended.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Ended {
    pub(crate) fn expect_success(&self, what: &str) -> anyhow::Result<()> {
        // Some programs say there what went wrong.
        let output = self.text();
        let last = output.trim().lines().last().unwrap_or_default();
        ensure!(self.status.success(), "{what}: {}: {} {last}", self.status, self.stderr.trim());
        Ok(())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// A process in a group of its own; what is left of the group is killed at the end.
pub(crate) struct Running {
    child: Child,
}

impl Running {
    pub(crate) fn spawn(command: &mut Command) -> anyhow::Result<Self> {
        let child = command
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {:?}", command.get_program()))?;
        Ok(Self { child })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) const fn child_mut(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Takes the standard output. Fails if the output is not piped or was taken before.
    pub(crate) fn output(&mut self) -> anyhow::Result<ChildStdout> {
        self.child.stdout.take().context("its output is not piped, or somebody has it")
    }

    pub(crate) fn signal(&self, kind: Signal) {
        signal(self.id(), kind);
    }

    /// Waits for the end; looks at `watch` every 5 ms meanwhile.
    pub(crate) fn wait(
        &mut self,
        limit: Duration,
        mut watch: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<ExitStatus> {
        let id = self.id();
        until_every(TICK, &format!("process {id} has ended"), limit, || {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Ok(status));
            }
            watch()?;
            Ok(Err(StateOf(id)))
        })
    }
}

/// The name and the state of a process, which are read only when they are shown.
struct StateOf(u32);

impl fmt::Display for StateOf {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0)).unwrap_or_default();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let (name, state) = (field("Name:"), field("State:"));
        let [name, state] = [name, state].map(|field| field.unwrap_or("?").trim());
        write!(formatter, "`{name}`, in state {state}")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::TERM);
            if self.wait(Duration::from_secs(10), || Ok(())).is_err() {
                let _ = kill_process_group(pid(self.id()), Signal::KILL);
                let _ = self.child.wait();
            }
        }
    }
}

fn pid(id: u32) -> Pid {
    i32::try_from(id).ok().and_then(Pid::from_raw).expect("a process id is a small positive number")
}

/// SIGKILL for any process.
pub(crate) fn kill_dead(id: u32) {
    signal(id, Signal::KILL);
}

/// A signal for any process. One that is stopped stands still when this returns.
pub(crate) fn signal(id: u32, signal: Signal) {
    let _ = kill_process(pid(id), signal);
    if signal == Signal::STOP {
        wait_until_stopped(id);
    }
}

/// A process that is stopped, and goes on when this is dropped: also one that a failed test leaves.
pub(crate) struct Stopped(u32);

impl Stopped {
    pub(crate) fn stop(id: u32) -> Self {
        signal(id, Signal::STOP);
        Self(id)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal(self.0, Signal::CONT);
    }
}

/// Runs a command to its end and collects what it says.
pub(crate) fn run(command: &mut Command, limit: Duration) -> anyhow::Result<Ended> {
    run_watched(command, limit, |_| Ok(()))
}

/// The same, with a look at the process every few milliseconds.
pub(crate) fn run_watched(
    command: &mut Command,
    limit: Duration,
    mut watch: impl FnMut(u32) -> anyhow::Result<()>,
) -> anyhow::Result<Ended> {
    let mut running = Running::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    let stdout = collect(running.output()?);
    let stderr = collect(running.child.stderr.take().context("no output")?);
    let id = running.id();
    let status = running.wait(limit, || watch(id));
    if status.is_err() {
        // Otherwise its pipes stay open, and what it said cannot be collected.
        let _ = kill_process_group(pid(id), Signal::KILL);
    }
    let (stdout, stderr) = (stdout.join(), stderr.join());
    let stderr = String::from_utf8_lossy(&stderr.unwrap_or_default()).into_owned();
    let status = status.with_context(|| format!("{command:?}: {}", stderr.trim()))?;
    Ok(Ended { status, stdout: stdout.unwrap_or_default(), stderr })
}

fn collect(mut from: impl Read + Send + 'static) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}

/// Whether a program can be found; the reason to skip if not.
pub(crate) fn missing(program: &str) -> Option<String> {
    let path = std::env::var("PATH").unwrap_or_default();
    let found = path.split(':').any(|dir| Path::new(dir).join(program).is_file());
    (!found).then(|| format!("`{program}` is not installed"))
}

/// The same, of several.
pub(crate) fn missing_any(programs: &[&str]) -> Option<String> {
    programs.iter().find_map(|program| missing(program))
}

/// Why users without privileges cannot read a file, if they cannot.
pub(crate) fn readable_by_all(file: &Path) -> Option<String> {
    let is_closed = |at: &Path| {
        let needed = if at == file { 0o004 } else { 0o001 };
        fs::metadata(at).is_ok_and(|at| at.permissions().mode() & needed == 0)
    };
    let closed = file.ancestors().find(|at| is_closed(at))?;
    Some(format!("other users may not reach {}, because of {}", file.display(), closed.display()))
}

/// The process and all that descend from it, as far as they can be seen at this moment.
pub(crate) fn family(id: u32) -> Vec<u32> {
    let mut members = vec![id];
    let mut at = 0;
    while let Some(&id) = members.get(at) {
        let tasks = fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
        for task in tasks {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            members.extend(children.split_whitespace().filter_map(|id| id.parse::<u32>().ok()));
        }
        at += 1;
    }
    members
}

/// The program's name as the kernel knows it, at most 15 bytes.
pub(crate) fn name_of(id: u32) -> Option<String> {
    Some(fs::read_to_string(format!("/proc/{id}/comm")).ok()?.trim_end().to_owned())
}

/// Resident anonymous memory of a process, in bytes.
pub(crate) fn anonymous_bytes(id: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}
