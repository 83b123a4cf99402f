//! One network namespace: made, entered, configured.

use crate::NetError;
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;

/// A network of its own, for as long as this or a process in it lives.
#[derive(Debug)]
pub struct Namespace(OwnedFd);

impl Namespace {
    pub(crate) fn new() -> Result<Namespace, NetError> {
        // A thread of its own: a namespace is a thread's, and this one is to stay where it is.
        let made = on_a_thread(|| {
            // SAFETY: a new network namespace leaves the thread's memory and descriptors as they
            // are.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            File::open("/proc/thread-self/ns/net")
        });
        Ok(Namespace(made.map_err(NetError::NotPermitted)?.into()))
    }

    /// A path to it, for tools that this process starts.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }

    /// Words to put before a command, so that it runs here, as long as this process lives.
    pub fn prefix(&self) -> Vec<OsString> {
        let mut option = OsString::from("--net=");
        option.push(self.path());
        vec!["nsenter".into(), option, "--".into()]
    }

    /// Has a thread do something here. Sockets that it makes stay here.
    ///
    /// # Panics
    /// If `work` does, or the namespace cannot be entered by who has made it.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        on_a_thread(|| {
            let entered =
                move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network));
            entered.expect("whoever may make a namespace may enter it");
            work()
        })
    }

    /// Lines for `ip`, as on its command line.
    pub(crate) fn ip(&self, lines: &str) -> Result<(), NetError> {
        self.batch("ip", lines)
    }

    /// The same for `bridge`.
    pub(crate) fn bridge(&self, lines: &str) -> Result<(), NetError> {
        self.batch("bridge", lines)
    }

    /// The same for `tc`.
    pub(crate) fn tc(&self, lines: &str) -> Result<(), NetError> {
        self.batch("tc", lines)
    }

    fn batch(&self, tool: &'static str, lines: &str) -> Result<(), NetError> {
        // Tools of this kind are in directories that not every user has in the path.
        let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
        // Entered by a thread and not by nsenter, so that a tool that is missing is known from one
        // that fails.
        let output = self.enter(|| -> io::Result<_> {
            let mut child = Command::new(tool)
                .args(["-batch", "-"])
                .env("PATH", path)
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()?;
            let written = child.stdin.take().expect("a pipe").write_all(lines.as_bytes());
            let output = child.wait_with_output()?;
            // A tool that fails at a line may not read the others: its words are the reason.
            written.or_else(|error| if output.status.success() { Err(error) } else { Ok(()) })?;
            Ok(output)
        });
        let output =
            output.map_err(|source| NetError::Missing { tool, package: "iproute2", source })?;
        if output.status.success() {
            return Ok(());
        }
        let complaint = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        Err(NetError::Failed { tool, complaint })
    }
}

fn on_a_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| match scope.spawn(work).join() {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}
