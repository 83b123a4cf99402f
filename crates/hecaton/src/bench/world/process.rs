//! Child processes that never outlive the bench.
//!
//! Each has a process group of its own. Ctrl-C in a terminal therefore reaches the bench alone,
//! which can then take things down in their order: the program before the swap it is on, the swap
//! before the server behind it.

use crate::bench::world::interrupt;
pub(crate) use crate::tools::{describe, require, tool};
use anyhow::Context as _;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};
use std::{
    fs,
    io::{BufRead as _, BufReader, Read},
    os::unix::process::CommandExt as _,
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus},
    sync::mpsc,
    time::{Duration, Instant},
};

/// Between two looks at Ctrl-C and at the child's memory.
const TICK: Duration = Duration::from_millis(20);

/// Time for a child to end after SIGTERM, before SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

/// Lines of a child's output. A thread reads them, so that waiting can be interrupted.
pub(crate) struct Lines(mpsc::Receiver<String>);

/// Lines that wait to be looked at; a child that writes more has to wait itself.
const LINES: usize = 64;

impl Lines {
    fn of(output: impl Read + Send + 'static) -> Self {
        let (sender, receiver) = mpsc::sync_channel(LINES);
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self(receiver)
    }

    /// The next line; nothing once the child has closed its output.
    pub(crate) fn next(&self) -> anyhow::Result<Option<String>> {
        loop {
            match self.0.recv_timeout(TICK) {
                Ok(line) => return Ok(Some(line)),
                Err(mpsc::RecvTimeoutError::Timeout) => interrupt::check()?,
                Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    }

    /// The next line, which must come before the deadline.
    pub(crate) fn next_before(&self, deadline: Instant) -> anyhow::Result<NextLine> {
        loop {
            match self.0.recv_timeout(TICK) {
                Ok(line) => return Ok(NextLine::Line(line)),
                Err(mpsc::RecvTimeoutError::Timeout) if Instant::now() >= deadline => {
                    return Ok(NextLine::Late);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => interrupt::check()?,
                Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(NextLine::End),
            }
        }
    }
}

/// Outcome of waiting for a line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NextLine {
    Line(String),
    /// The child has closed its output.
    End,
    /// The deadline has passed.
    Late,
}

/// A child that is ended and reaped when it goes out of scope.
pub(crate) struct Guarded {
    child: Child,
    pidfd: OwnedFd,
    name: String,
    peak_bytes: u64,
}

impl Guarded {
    pub(crate) fn spawn(command: &mut Command) -> anyhow::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child =
            command.process_group(0).spawn().with_context(|| format!("cannot start `{name}`"))?;
        let pidfd = pidfd_open(pid_of(&child), PidfdFlags::empty())
            .with_context(|| format!("cannot watch `{name}`"))?;
        Ok(Self { child, pidfd, name, peak_bytes: 0 })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Where the child reads from.
    pub(crate) fn input(&mut self) -> anyhow::Result<ChildStdin> {
        self.child.stdin.take().context("the input is no pipe")
    }

    /// Takes the child's output, as bytes.
    pub(crate) fn output(&mut self) -> anyhow::Result<ChildStdout> {
        self.child.stdout.take().context("the output is no pipe")
    }

    /// Takes the child's output, as lines; its standard output must be a pipe.
    pub(crate) fn lines(&mut self) -> anyhow::Result<Lines> {
        self.output().map(Lines::of)
    }

    /// The most memory that the process had resident at once, as far as it was seen.
    pub(crate) fn peak_bytes(&mut self) -> u64 {
        self.peak_bytes = self.peak_bytes.max(peak_resident_bytes(self.id()).unwrap_or(0));
        self.peak_bytes
    }

    /// How the process ended, if it has.
    pub(crate) fn exit_status(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits for an end without failure, however long it takes.
    pub(crate) fn finish(&mut self) -> anyhow::Result<()> {
        loop {
            if let Some(status) = self.wait_until(Instant::now() + GRACE)? {
                anyhow::ensure!(status.success(), "`{}` {}", self.name, describe(status));
                return Ok(());
            }
        }
    }

    /// Waits for the end, but not longer than until `deadline`: then there is no status. The
    /// moment of the end is known to some microseconds.
    pub(crate) fn wait_until(&mut self, deadline: Instant) -> anyhow::Result<Option<ExitStatus>> {
        let tick = Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
        loop {
            self.peak_bytes();
            let ended = match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&tick)) {
                Ok(ready) => ready > 0,
                Err(rustix::io::Errno::INTR) => false,
                Err(error) => return Err(error).context("cannot wait for a child"),
            };
            if ended {
                return Ok(Some(self.child.wait()?));
            }
            interrupt::check()?;
            if Instant::now() >= deadline {
                return Ok(None);
            }
        }
    }

    fn end(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        // Not reaped yet, so the number cannot have become another group's.
        let group = pid_of(&self.child);
        for signal in [Signal::TERM, Signal::KILL] {
            let _ = kill_process_group(group, signal);
            let deadline = Instant::now() + GRACE;
            while Instant::now() < deadline {
                if !matches!(self.child.try_wait(), Ok(None)) {
                    return;
                }
                std::thread::sleep(TICK);
            }
        }
        tracing::warn!(process = self.name, pid = self.id(), "does not end on SIGKILL");
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.end();
    }
}

fn pid_of(child: &Child) -> Pid {
    let id = i32::try_from(child.id()).expect("process ids are below 2^22");
    Pid::from_raw(id).expect("a child's process id is not zero")
}

/// The high-water mark of a process's resident memory.
pub(crate) fn peak_resident_bytes(id: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kilobytes << 10)
}

/// Tries until it works, and fails with the last reason.
pub(crate) fn eventually<T>(
    limit: Duration,
    mut attempt: impl FnMut() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        match attempt() {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_) => {
                interrupt::check()?;
                std::thread::sleep(TICK);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_testkit::patience;

    #[test]
    fn a_guarded_child_ends_with_its_guard() {
        let guarded = Guarded::spawn(Command::new("sleep").arg("600")).unwrap();
        let id = guarded.id();
        assert!(peak_resident_bytes(id).is_some());
        drop(guarded);
        assert!(!std::path::Path::new(&format!("/proc/{id}")).exists());
    }

    #[test]
    fn waiting_stops_at_the_deadline() {
        let mut guarded = Guarded::spawn(Command::new("sleep").arg("600")).unwrap();
        assert!(guarded.wait_until(Instant::now()).unwrap().is_none());
        let mut guarded = Guarded::spawn(&mut Command::new("false")).unwrap();
        let status = guarded.wait_until(Instant::now() + patience()).unwrap();
        assert_eq!(describe(status.unwrap()), "ended with status 1");
    }

    #[test]
    fn a_failing_tool_is_quoted() {
        let error = tool("ls", &["/nowhere/at/all"]).unwrap_err().to_string();
        assert!(error.contains("/nowhere/at/all"), "{error}");
        assert!(error.contains("ended with status 2"), "{error}");
    }
}
