//! The process behind a monitor, which is helped to its end when it hangs there.
//!
//! QEMU can hang while it ends (7.2 and 10.0 were seen to): it waits for a command that its monitor
//! was doing at that moment, and nothing wakes it. The guest is off by then, and its disks are
//! closed. A signal wakes it, and what SIGTERM asks for it is doing already. A command that comes a
//! little later can crash it. So it is asked nothing once it has told of its guest's end, and what
//! was asked just before that is what this is for.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A QEMU that is known by its own monitor.
#[derive(Debug)]
pub(super) struct Process(OwnedFd);

impl Process {
    /// The one that listens where `stream` leads. None if that is in another process namespace, or
    /// is no QEMU: somebody may have listened for it, and live on without it.
    pub(super) fn behind(stream: &UnixStream) -> Option<Process> {
        let pid = peer_pid(stream)?;
        let descriptor = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        let program = fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero())).ok()?;
        is_qemu(&program).then_some(Process(descriptor))
    }

    /// Sends it SIGTERM. False if it has ended.
    pub(super) fn terminate(&self) -> bool {
        pidfd_send_signal(&self.0, Signal::TERM).is_ok()
    }
}

/// The process that listens where `stream` leads.
pub(super) fn peer_pid(stream: &UnixStream) -> Option<Pid> {
    let peer = rustix::net::sockopt::socket_peercred(stream).ok()?;
    // 0 is a process of another namespace.
    Pid::from_raw(peer.pid.as_raw_nonzero().get())
}

/// Whether it is called as the distributions call QEMU.
fn is_qemu(program: &Path) -> bool {
    let name = program.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    // Its file was replaced since it was started.
    let name = name.strip_suffix(" (deleted)").unwrap_or(name);
    name.starts_with("qemu-") || name == "kvm"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::fake::{GREETING, returns};
    use crate::qmp::{Monitor, QmpError};
    use hecaton_testkit::{patience, scaled, wait_until_seen};
    use rustix::process::set_parent_process_death_signal;
    use serde_json::Value;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    /// Where a process that this test program starts is to listen as a monitor.
    const LISTENS_AT: &str = "HECATON_TEST_MONITOR";

    const SHUTDOWN: &str = "{\"event\": \"SHUTDOWN\", \"data\": {}, \"timestamp\": {}}\n";

    /// In the process that the tests below start: a monitor that shuts down and hangs at
    /// `query-status`, and lives on after `query-memdev`.
    #[test]
    fn a_monitor_of_its_own_process() {
        let Some(path) = std::env::var_os(LISTENS_AT) else { return };
        set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
        let listener = UnixListener::bind(path).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        writeln!(stream, "{GREETING}").unwrap();
        for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
            let request: Value = serde_json::from_str(&line).unwrap();
            let answer = match request["execute"].as_str() {
                Some("query-status") => SHUTDOWN.to_owned(),
                Some("query-memdev") => SHUTDOWN.to_owned() + &returns(&request, "[]"),
                Some("query-balloon") => String::new(),
                _ => returns(&request, "{}"),
            };
            stream.write_all(answer.as_bytes()).unwrap();
        }
    }

    /// Starts one whose program is called `name`, and connects.
    fn start(name: &str) -> (Child, Monitor) {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join(name);
        // By another process: while this one has the file open, another thread may fork, and what
        // is open for writing cannot be executed.
        let copied =
            Command::new("cp").args([&std::env::current_exe().unwrap(), &program]).status();
        assert!(copied.unwrap().success());
        let socket = dir.path().join("qmp");
        let child = Command::new(&program)
            .args(["--exact", "qmp::process::tests::a_monitor_of_its_own_process"])
            .env(LISTENS_AT, &socket)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let connect = || Monitor::connect(&socket, patience());
        (child, wait_until_seen("the monitor listens", connect))
    }

    const SHORT: Duration = Duration::from_millis(100);

    #[test]
    fn one_that_hangs_as_it_ends_is_sent_sigterm() {
        let (mut qemu, mut monitor) = start("qemu-system-x86_64");
        // It may take longer to tell of its guest's end.
        wait_until_seen("it is found to hang", || match monitor.status(SHORT) {
            Err(QmpError::HungAtEnd { .. }) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        assert_eq!(qemu.wait().unwrap().signal(), Some(15));
    }

    #[test]
    fn one_that_is_silent_or_lives_on_or_is_no_qemu_is_not() {
        let (mut qemu, mut monitor) = start("qemu-kvm");
        let is_silent = |monitor: &mut Monitor, command| {
            let error = monitor.execute(command, Value::Null, SHORT).expect_err("no answer");
            assert!(matches!(error, QmpError::Silent { .. }), "{error}");
        };
        is_silent(&mut monitor, "query-balloon");
        monitor.execute("query-memdev", Value::Null, patience()).unwrap();
        // It is given time to end, and has not.
        monitor.execute("query-name", Value::Null, scaled(Duration::from_secs(5))).unwrap();
        is_silent(&mut monitor, "query-balloon");
        assert_eq!(qemu.try_wait().unwrap(), None);
        drop(monitor);
        qemu.wait().unwrap();

        let (mut other, mut monitor) = start("virtqemud");
        is_silent(&mut monitor, "query-status");
        assert_eq!(other.try_wait().unwrap(), None);
        drop(monitor);
        other.wait().unwrap();
    }
}
