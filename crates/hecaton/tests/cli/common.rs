//! Runs the real command, and cleans up after a test that fails.

use hecaton_memory::{Epoch, Generation, SpaceId};
use hecaton_testkit::{patience, wait_for, wait_until_seen};
use hecaton_transport::client::{Connection, ConnectionError, Options, Outcome};
use hecaton_transport::protocol::{Hello, Request, VERSIONS};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

/// The command, without the environment of whoever runs the tests.
pub(crate) fn hecaton() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hecaton"));
    command
        .env_remove("HECATON_MANAGER")
        .env_remove("HECATON_LOG")
        .env_remove("HECATON_TLS")
        .stdin(Stdio::null());
    command
}

/// Runs the command to its end.
pub(crate) fn output<const N: usize>(args: [&str; N]) -> Output {
    hecaton().args(args).output().expect("the command starts")
}

/// Returns the output of a command as text.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// A directory for clusters: short, because sockets have short names.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("hct-").tempdir_in("/tmp").expect("a directory")
}

/// A daemon that is ended with the test.
pub(crate) struct Daemon {
    child: Child,
    /// The line of JSON by which it said that it is ready.
    pub(crate) ready: Value,
}

impl Daemon {
    /// Starts a daemon that prints one line of JSON when it is ready.
    pub(crate) fn start(command: &mut Command) -> Daemon {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the command starts");
        let mut line = String::new();
        let output = child.stdout.take().expect("a pipe");
        BufReader::new(output).read_line(&mut line).expect("a line");
        let ready = serde_json::from_str(&line).unwrap_or_else(|_| {
            let _ = child.kill();
            panic!("not ready but `{line}`")
        });
        Daemon { child, ready }
    }

    /// A manager at an address, which keeps nothing on a disk.
    pub(crate) fn manage(listen: &str) -> Daemon {
        Daemon::start(hecaton().args(["manager", "--json", "--listen", listen]))
    }

    /// A development cluster in `dir`.
    pub(crate) fn dev(dir: &Path, donors: u16) -> Daemon {
        let donors = donors.to_string();
        Daemon::start(
            hecaton()
                .args(["dev", "--json", "--lend", "64M", "--donors", &donors, "--dir"])
                .arg(dir),
        )
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The manager's URL.
    pub(crate) fn manager(&self) -> &str {
        self.ready["manager"].as_str().expect("a URL")
    }

    /// Ends it with a signal and waits.
    pub(crate) fn end(mut self, signal: rustix::process::Signal) -> ExitStatus {
        signal_process(self.pid(), signal);
        wait(&mut self.child)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            signal_process(self.pid(), rustix::process::Signal::TERM);
            wait(&mut self.child);
        }
    }
}

/// Waits for a child; kills it, and fails, if it does not end.
pub(crate) fn wait(child: &mut Child) -> ExitStatus {
    let what = format!("process {} ends", child.id());
    let ended = wait_for(&what, patience(), || {
        child.try_wait().expect("a child").ok_or("the process runs")
    });
    ended.unwrap_or_else(|timed_out| {
        let _ = child.kill();
        panic!("{timed_out}")
    })
}

/// Sends a signal to a process that is there.
pub(crate) fn signal_process(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("not zero");
    rustix::process::kill_process(pid, signal).expect("signalled");
    if signal == rustix::process::Signal::STOP {
        hecaton_testkit::wait_until_stopped(pid.as_raw_nonzero().get() as u32);
    }
}

/// Whether a process runs; one that is dead and not reaped does not.
pub(crate) fn runs(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => !stat.rsplit(')').next().is_some_and(|rest| rest.trim().starts_with('Z')),
        Err(_) => false,
    }
}

/// Waits until `look` returns a value that is so.
pub(crate) fn wait_until_so(
    what: &str,
    mut look: impl FnMut() -> Value,
    is_so: impl Fn(&Value) -> bool,
) -> Value {
    wait_until_seen(what, || {
        let value = look();
        if is_so(&value) { Ok(value) } else { Err(value) }
    })
}

/// `hecaton status --json` of the cluster in `dir`.
pub(crate) fn status(dir: &Path) -> Value {
    let output =
        hecaton().args(["status", "--json", "--dir"]).arg(dir).output().expect("the command runs");
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The processes of a cluster's donors.
pub(crate) fn donor_pids(status: &Value) -> Vec<u32> {
    let nodes = status["nodes"].as_array().expect("nodes").iter();
    let donors = nodes.flat_map(|node| node["donors"].as_array().expect("donors"));
    donors.map(|donor| donor["pid"].as_u64().expect("a process") as u32).collect()
}

/// Asks a donor as a borrower would, over the page protocol.
pub(crate) fn borrow(donor: &Value, lane: u64) -> Result<Connection, ConnectionError> {
    let address: std::net::SocketAddr =
        donor["address"].as_str().expect("text").parse().expect("an address");
    let hello = Hello {
        versions: VERSIONS,
        space: SpaceId(7),
        epoch: Epoch(1),
        lane,
        lease: Duration::from_secs(3600),
        consumer: "test".to_owned(),
    };
    Connection::open(address, &hello, &Options::default())
}

/// Whether the donor gives somebody an extent.
pub(crate) fn lends(donor: &Value, lane: u64) -> bool {
    let request =
        Request::Allocate { segment: lane, member: 0, order: 4, generation: Generation(1) };
    let mut connection = borrow(donor, lane).expect("welcomed");
    match connection.call(request, &[]).expect("answered") {
        Outcome::Allocated(_) => true,
        Outcome::Refused(_) => false,
        other => panic!("{other:?}"),
    }
}

/// Returns the body of an HTTP server's answer.
pub(crate) fn get(url: &str) -> String {
    let mut response = ureq::get(url).call().expect("answered");
    let mut text = String::new();
    response.body_mut().as_reader().read_to_string(&mut text).expect("text");
    text
}

/// A file that is executable.
pub(crate) fn executable(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join(name);
    std::fs::write(&path, bytes).expect("written");
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&path, mode).expect("executable");
    path
}
