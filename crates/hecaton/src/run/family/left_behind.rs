//! Tells which processes a program has left running: its command waits for them.
//!
//! They are known by their environment, which names their pager. A process that writes over its
//! environment (to change what `ps` shows) is waited for, and not named.

use hecaton_uffd::handover::{HELPER_NAME, SOCKET_VARIABLE};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Most that are named.
const MAX_NAMED: usize = 8;

/// One line, if there are any: how many, their names, and how to stop waiting.
pub(crate) fn describe(program: &str, socket: &Path) -> Option<String> {
    let processes: Vec<String> = served_by(socket).into_iter().filter_map(named).collect();
    line(program, &processes, std::process::id())
}

fn line(program: &str, processes: &[String], own_pid: u32) -> Option<String> {
    let count = match processes.len() {
        0 => return None,
        1 => "1 process".to_owned(),
        count => format!("{count} processes"),
    };
    let more = match processes.len().saturating_sub(MAX_NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let named = processes[..processes.len().min(MAX_NAMED)].join(", ");
    Some(format!(
        "`{program}` has ended; waiting for {count} that it left running: {named}{more}; \
         `kill {own_pid}` stops waiting and lets them run"
    ))
}

fn served_by(socket: &Path) -> Vec<u32> {
    let wanted = [SOCKET_VARIABLE.as_bytes(), b"=", socket.as_os_str().as_bytes()].concat();
    let is_served = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == wanted)
    };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(is_served).filter(|pid| !is_helper(*pid)).collect()
}

/// A helper has the environment of the process whose memory it shares.
fn is_helper(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/comm"))
        .is_ok_and(|name| name.trim_ascii_end() == HELPER_NAME.to_bytes())
}

/// `None` if it has ended.
fn named(pid: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(format!("{} ({pid})", name.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_testkit::wait_until;
    use std::process::Command;

    #[test]
    fn process_is_known_by_its_pager() {
        let socket = Path::new("/test/left-behind");
        assert!(served_by(socket).is_empty());
        let mut child =
            Command::new("sleep").arg("60").env(SOCKET_VARIABLE, socket).spawn().unwrap();
        // The kernel lets the parent of a new program go on a moment before the program has its
        // environment.
        wait_until("the process is found", || served_by(socket) == [child.id()]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(served_by(socket).is_empty());
    }

    #[test]
    fn line_names_some_and_counts_all() {
        assert_eq!(line("x", &[], 7), None);
        let one = line("x", &["a (1)".to_owned()], 7).unwrap();
        assert!(one.contains("waiting for 1 process ") && one.contains("a (1); `kill 7`"), "{one}");
        let many: Vec<_> = (0..10).map(|pid| format!("b ({pid})")).collect();
        let many = line("x", &many, 7).unwrap();
        assert!(many.contains("10 processes") && many.contains("b (7) and 2 more;"), "{many}");
    }
}
