//! A child process, from its start until it and all that it started are reaped.
//!
//! Each child has a stream from the node as its standard input. When that ends without a word, the
//! node was killed: then the child waits for another node, or ends, as it was told at its start.
//! `PR_SET_PDEATHSIG` was rejected: it fires when the *thread* that forked ends, and it would take
//! a pager from under a running program. Each child leads a process group, so that a Ctrl-C at the
//! terminal reaches only the node, which ends the children in its own order.
//!
//! A child has ended when the last process of its group has ended: then no leftover process can act
//! beside the child's successor. A child adopted from an earlier node has another parent, so the
//! node can ask for neither its group nor its exit status. The node waits for its process
//! descriptor, and learns from the child's last message why it ended.

use crate::channel::Receiver;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_open, pidfd_send_signal,
    waitid,
};
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

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
        Ok(RunningChild { group: Pid::from_child(&child), child })
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
    group: Pid,
}

/// A child of a node before this one.
#[derive(Debug)]
pub struct AdoptedChild {
    pid: Pid,
    process: Arc<OwnedFd>,
}

/// A child, from whichever node it comes.
#[derive(Debug)]
pub enum Running {
    /// This node has started it.
    Started(RunningChild),
    /// A node before this one has.
    Adopted(AdoptedChild),
}

/// A child, and the stream to it.
#[derive(Debug)]
pub(crate) struct Conversation {
    /// The process.
    pub(crate) process: Running,
    /// The way down.
    pub(crate) stream: UnixStream,
    /// Messages from the child.
    pub(crate) receiver: Receiver,
}

/// Something to signal a child by.
#[derive(Clone, Debug)]
pub enum Target {
    /// A process group. Valid until [`RunningChild::wait`] has returned: the kernel gives a group's
    /// number to no other process while the group has a member that is not reaped.
    Group(Pid),
    /// A process that is somebody else's child.
    Process(Arc<OwnedFd>),
}

impl Target {
    /// Sends `signal`.
    pub fn signal(&self, signal: Signal) {
        // Fails when all have ended, which is as well.
        let _ = match self {
            Target::Group(group) => rustix::process::kill_process_group(*group, signal),
            Target::Process(process) => pidfd_send_signal(process, signal),
        };
    }
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It exited with this status.
    Exited(i32),
    /// This signal killed it.
    Killed(i32),
    /// Only its parent was told, which is not this node.
    Unknown,
}

impl End {
    /// Whether the process did not mean to end: a signal killed it, or it panicked. One that means
    /// to says so before, and so an end of which nothing is known is none that was meant.
    pub fn is_crash(self) -> bool {
        matches!(self, End::Killed(_) | End::Exited(hecaton_pager::PANICKED) | End::Unknown)
    }
}

impl RunningChild {
    /// The leader's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Something to signal it by.
    pub fn target(&self) -> Target {
        Target::Group(self.group)
    }

    /// Waits until the whole group has ended, and tells how the last of it did.
    pub fn wait(self) -> io::Result<End> {
        let mut last = None;
        loop {
            match waitid(WaitId::Pgid(Some(self.group)), WaitIdOptions::EXITED) {
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

impl AdoptedChild {
    /// The process `pid`. The caller hears from it after this, and so knows that the number was not
    /// another's by now.
    pub fn open(pid: Pid) -> io::Result<AdoptedChild> {
        let process = Arc::new(pidfd_open(pid, PidfdFlags::empty())?);
        Ok(AdoptedChild { pid, process })
    }

    /// Waits until it has ended, or time is up; `true` in the first case.
    pub fn wait_for(&self, patience: Option<Duration>) -> io::Result<bool> {
        let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
        loop {
            let mut polled = [PollFd::new(&*self.process, PollFlags::IN)];
            match poll(&mut polled, patience.as_ref()) {
                Ok(events) => return Ok(events > 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl Running {
    /// The process id.
    pub fn pid(&self) -> u32 {
        match self {
            Running::Started(child) => child.pid(),
            Running::Adopted(child) => child.pid.as_raw_nonzero().get().unsigned_abs(),
        }
    }

    /// Something to signal it by.
    pub fn target(&self) -> Target {
        match self {
            Running::Started(child) => child.target(),
            Running::Adopted(child) => Target::Process(Arc::clone(&child.process)),
        }
    }

    /// Waits until it has ended.
    pub fn wait(self) -> io::Result<End> {
        match self {
            Running::Started(child) => child.wait(),
            Running::Adopted(child) => child.wait_for(None).map(|_| End::Unknown),
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
            End::Unknown => write!(f, "it ended without a word"),
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
        child.target().signal(Signal::KILL);
        assert_eq!(child.wait().expect("waited"), End::Killed(9));
        assert!(test_kill_process(second).is_err(), "it is reaped");
    }

    #[test]
    fn an_adopted_one_is_waited_for_and_signalled_without_being_a_child() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "read x"]).stdin(Stdio::piped());
        let mut other = command.spawn().expect("spawned");
        let adopted = AdoptedChild::open(Pid::from_child(&other)).expect("it is there");
        assert!(!adopted.wait_for(Some(Duration::from_millis(1))).expect("waited"));
        let running = Running::Adopted(adopted);
        assert_eq!(running.pid(), other.id());
        running.target().signal(Signal::KILL);
        assert_eq!(running.wait().expect("waited"), End::Unknown);
        assert_eq!(other.wait().expect("reaped").code(), None);
    }
}
