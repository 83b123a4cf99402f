//! A child process, from its start until it and all that it started are reaped.
//!
//! Children end with the node without being told: each has a stream from the node as its standard
//! input and ends (a donor), or starts to end (a pager), when that stream does. `PR_SET_PDEATHSIG`
//! was rejected: it fires when the *thread* that forked ends, and it would take a pager from under
//! a running program. Each child leads a process group, so that a Ctrl-C at the terminal reaches
//! only the node, which ends the children in its own order.
//!
//! A child has ended when the last process of its group has: nothing of it is left then that could
//! act beside another that is started in its place.

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, waitid};
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// How the node runs the other roles of its own executable.
#[derive(Clone, Debug)]
pub struct ChildCommand {
    /// The executable.
    pub program: PathBuf,
    /// Arguments before the role's name.
    pub args: Vec<OsString>,
}

impl ChildCommand {
    /// Starts the role `role` with the given standard input and output.
    pub fn spawn(&self, role: &str, stdin: Stdio, stdout: Stdio) -> io::Result<RunningChild> {
        let child = Command::new(&self.program)
            .args(&self.args)
            .arg(role)
            .stdin(stdin)
            .stdout(stdout)
            .process_group(0)
            .spawn()?;
        Ok(RunningChild { group: Group(Pid::from_child(&child)), child })
    }
}

/// Makes this process the parent of its descendants' orphans: without that, [`RunningChild::wait`]
/// knows only of the leader's end. Not every container has an init that reaps, either.
pub fn adopt_orphans() -> io::Result<()> {
    Ok(rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?)
}

/// A child that is not reaped yet.
#[derive(Debug)]
pub struct RunningChild {
    /// The process, for its standard input and output.
    pub child: Child,
    group: Group,
}

/// The process group of a child. Valid until [`RunningChild::wait`] has returned: the kernel gives
/// a group's number to no other process while the group has a member that is not reaped.
#[derive(Clone, Copy, Debug)]
pub struct Group(Pid);

impl Group {
    /// Sends `signal` to all its members.
    pub fn signal(self, signal: Signal) {
        // Fails when all have ended, which is as well.
        let _ = rustix::process::kill_process_group(self.0, signal);
    }
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It exited with this status.
    Exited(i32),
    /// This signal killed it.
    Killed(i32),
}

impl End {
    /// Whether the process did not mean to end: a signal killed it, or it panicked.
    pub fn is_crash(self) -> bool {
        matches!(self, End::Killed(_) | End::Exited(hecaton_pager::PANICKED))
    }
}

impl RunningChild {
    /// The leader's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Something to signal it by.
    pub fn group(&self) -> Group {
        self.group
    }

    /// Waits until the whole group has ended, and tells how the last of it did.
    pub fn wait(self) -> io::Result<End> {
        let mut last = None;
        loop {
            match waitid(WaitId::Pgid(Some(self.group.0)), WaitIdOptions::EXITED) {
                Ok(status) => last = status.as_ref().and_then(end).or(last),
                Err(Errno::INTR) => {}
                Err(Errno::CHILD) => {
                    return last.ok_or_else(|| io::Error::other("somebody else reaped it"));
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

fn end(status: &WaitIdStatus) -> Option<End> {
    let exited = status.exit_status().map(End::Exited);
    exited.or_else(|| status.terminating_signal().map(End::Killed))
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Exited(status) => write!(f, "it ended with status {status}"),
            End::Killed(signal) => write!(f, "it was killed by signal {signal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{kill_process, test_kill_process};
    use std::io::{BufRead, BufReader};

    fn shell(script: &str) -> ChildCommand {
        ChildCommand { program: "/bin/sh".into(), args: vec!["-c".into(), script.into()] }
    }

    /// A shell in a group with another process, which exits with 7 when it is sent SIGUSR1.
    fn two_processes() -> (RunningChild, Pid) {
        adopt_orphans().expect("adopted");
        let script =
            "(trap 'exit 7' USR1; echo ready; while :; do sleep 0.01; done) & echo $!; wait";
        let mut child =
            shell(script).spawn("role", Stdio::null(), Stdio::piped()).expect("spawned");
        let output = BufReader::new(child.child.stdout.take().expect("a pipe"));
        let lines: Vec<_> = output.lines().take(2).map(|line| line.expect("a line")).collect();
        let second = lines.iter().find_map(|line| line.parse().ok()).expect("a number");
        (child, Pid::from_raw(second).expect("not zero"))
    }

    #[test]
    fn the_end_is_that_of_the_last_of_the_group() {
        let (child, second) = two_processes();
        kill_process(Pid::from_child(&child.child), Signal::KILL).expect("killed");
        kill_process(second, Signal::USR1).expect("signalled");
        assert_eq!(child.wait().expect("waited"), End::Exited(7));
    }

    #[test]
    fn a_signal_reaches_the_whole_group() {
        let (child, second) = two_processes();
        child.group().signal(Signal::KILL);
        assert_eq!(child.wait().expect("waited"), End::Killed(9));
        assert!(test_kill_process(second).is_err(), "it is reaped");
    }
}
