//! The commands that make a Hecaton cluster of the hosts: whoever runs them looks after the
//! processes.
//!
//! All of them run on one machine, whose nodes commands tell apart by their directories: each host
//! has one, and commands on it find their node and their manager there.

use crate::Host;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

const MANAGER_PORT: u16 = 7070;
const DONOR_PORT: u16 = 7071;

/// Words to put before a command, so that it runs on the host and finds the node there. `runtime`
/// is the host's directory.
pub fn prefix(host: &Host, runtime: &Path) -> Vec<OsString> {
    let mut prefix = host.namespace().prefix();
    let mut directory = OsString::from("XDG_RUNTIME_DIR=");
    directory.push(runtime);
    prefix.extend(["env", "-u", "HECATON_MANAGER"].map(OsString::from));
    prefix.push(directory);
    prefix
}

/// Where the manager on that host is reached.
pub fn manager_url(host: &Host) -> String {
    format!("http://{}:{MANAGER_PORT}", host.address())
}

/// `hecaton manager`, which tells in a line of JSON that it is ready.
pub fn manager(hecaton: &Path, host: &Host, runtime: &Path) -> Command {
    let mut command = after(prefix(host, runtime), hecaton);
    command.args(["manager", "--json", "--insecure"]);
    command.args(["--listen", &format!("{}:{MANAGER_PORT}", host.address())]);
    command
}

/// `hecaton node` with the host's name, which lends so many bytes, if any. It has the same address
/// in each of its lives.
pub fn node(
    hecaton: &Path,
    host: &Host,
    runtime: &Path,
    manager: &Host,
    lend: Option<u64>,
) -> Command {
    let mut command = lender(hecaton, host, runtime, lend);
    command.args(["--manager", &manager_url(manager)]);
    command
}

/// The same without a manager: it finds the others by announcements, which the key in a file
/// protects.
pub fn announcing_node(
    hecaton: &Path,
    host: &Host,
    runtime: &Path,
    key: &Path,
    lend: Option<u64>,
) -> Command {
    let mut command = lender(hecaton, host, runtime, lend);
    command.args(["--announce", "--announce-from", &host.address().to_string()]);
    command.arg("--announce-key").arg(key);
    command
}

fn lender(hecaton: &Path, host: &Host, runtime: &Path, lend: Option<u64>) -> Command {
    let mut command = after(prefix(host, runtime), hecaton);
    command.args(["node", "--name", &host.name()]);
    if let Some(lend) = lend {
        let listen = format!("{}:{DONOR_PORT}", host.address());
        command.args(["--lend", &lend.to_string(), "--listen", &listen, "--insecure"]);
    }
    command
}

fn after(prefix: Vec<OsString>, program: &Path) -> Command {
    let mut words = prefix.into_iter();
    let mut command = Command::new(words.next().expect("it begins with a program"));
    command.args(words).arg(program);
    command
}
