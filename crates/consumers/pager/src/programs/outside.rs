//! Counts child processes of a consumer's programs that are not on the pool.
//!
//! Such processes run statically linked or set-user-ID programs, or a program started them by a
//! system call of its own. They send the pager no message. So the pager walks the process tree in
//! /proc once a second. A process that ends before the second walk is not counted.

use crate::stats::Outside;
use hecaton_memory::PAGE_SIZE;
use hecaton_uffd::handover::HELPER_NAME;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::time::{Duration, Instant};

/// Between two walks of the process tree.
const PAUSE: Duration = Duration::from_secs(1);
/// Walks take at most one part in so many of the time, for any number of processes on the host.
const SHARE: u32 = 50;

/// Bounds what each report carries.
const MAX_NAMES: usize = 8;

/// Walks that see a process before it counts: a process that was just forked attaches, or executes
/// a program, within milliseconds.
const LOOKS: u32 = 2;

/// One process, as read from `/proc/PID/stat`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Process {
    pid: i32,
    parent: i32,
    name: String,
    /// Start time in clock ticks since boot. A later process with this number has another one.
    started: u64,
    mapped_bytes: u64,
}

impl Process {
    /// `None` also for a zombie.
    fn parse(stat: &str) -> Option<Process> {
        // The name may have any characters in it.
        let (pid, rest) = stat.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(") ")?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let number = |at: usize| fields.get(at)?.parse().ok();
        let has_ended = matches!(*fields.first()?, "Z" | "X");
        (!has_ended).then_some(Process {
            pid: pid.parse().ok()?,
            parent: fields.get(1)?.parse().ok()?,
            name: name.to_owned(),
            started: number(19)?,
            mapped_bytes: number(20)?,
        })
    }
}

fn all_processes() -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let stats = pids.filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/stat")).ok());
    stats.filter_map(|stat| Process::parse(&stat)).collect()
}

/// Resident anonymous bytes. 0 if the process has ended.
fn anonymous_bytes(pid: i32) -> u64 {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let mut pages = statm.split_ascii_whitespace().skip(1).map_while(|field| field.parse().ok());
    let [resident, of_files]: [u64; 2] = [(); 2].map(|()| pages.next().unwrap_or_default());
    resident.saturating_sub(of_files) * PAGE_SIZE as u64
}

/// Observations of one process.
struct Seen {
    looks: u32,
    peak_bytes: u64,
}

/// Observes the processes, and counts those that are not on the pool.
pub(crate) struct Watch {
    next_look: Instant,
    /// By process number and start time.
    living: HashMap<(i32, u64), Seen>,
    processes: u64,
    names: Vec<String>,
    /// Sum of the peaks of counted processes that have ended.
    ended_bytes: u64,
}

impl Watch {
    pub(crate) fn new() -> Watch {
        Watch {
            next_look: Instant::now() + PAUSE,
            living: HashMap::new(),
            processes: 0,
            names: Vec::new(),
            ended_bytes: 0,
        }
    }

    /// Walks the process tree from the `attached` processes. `None` if the pause has not passed.
    pub(crate) fn look_now_and_then(&mut self, attached: &HashSet<i32>) -> Option<Outside> {
        let began = Instant::now();
        if began < self.next_look {
            return None;
        }
        self.look(attached, &all_processes(), anonymous_bytes);
        self.next_look = Instant::now() + PAUSE.max(began.elapsed() * SHARE);
        Some(self.found())
    }

    fn look(
        &mut self,
        attached: &HashSet<i32>,
        processes: &[Process],
        bytes_of: impl Fn(i32) -> u64,
    ) {
        let mut children: HashMap<i32, Vec<&Process>> = HashMap::new();
        for process in processes {
            children.entry(process.parent).or_default().push(process);
        }
        let is_outside = |parent: &Process, child: &Process| {
            // A child with the parent's size was just forked, or shares the parent's memory until
            // it executes a program (vfork).
            !attached.contains(&child.pid)
                && child.name.as_bytes() != HELPER_NAME.to_bytes()
                && !(attached.contains(&parent.pid) && child.mapped_bytes == parent.mapped_bytes)
        };
        let is_known = |process: &&Process| {
            attached.contains(&process.pid)
                || self.living.contains_key(&(process.pid, process.started))
        };
        let mut parents: Vec<&Process> = processes.iter().filter(is_known).collect();
        let mut outside: HashMap<i32, &Process> = parents
            .iter()
            .filter(|process| !attached.contains(&process.pid))
            .map(|&process| (process.pid, process))
            .collect();
        while let Some(parent) = parents.pop() {
            for &child in children.get(&parent.pid).into_iter().flatten() {
                if is_outside(parent, child) && outside.insert(child.pid, child).is_none() {
                    parents.push(child);
                }
            }
        }
        for process in outside.values() {
            self.see(process, bytes_of(process.pid));
        }
        let is_there = |&(pid, started): &(i32, u64)| {
            outside.get(&pid).is_some_and(|process| process.started == started)
        };
        let ended = self.living.extract_if(|key, _| !is_there(key));
        self.ended_bytes += ended.map(|(_, seen)| counted_bytes(&seen)).sum::<u64>();
    }

    fn see(&mut self, process: &Process, bytes: u64) {
        let key = (process.pid, process.started);
        let seen = self.living.entry(key).or_insert(Seen { looks: 0, peak_bytes: 0 });
        seen.looks = (seen.looks + 1).min(LOOKS + 1);
        seen.peak_bytes = seen.peak_bytes.max(bytes);
        if seen.looks == LOOKS {
            self.processes += 1;
            if self.names.len() < MAX_NAMES && !self.names.contains(&process.name) {
                self.names.push(process.name.clone());
            }
        }
    }

    fn found(&self) -> Outside {
        let living: u64 = self.living.values().map(counted_bytes).sum();
        Outside {
            processes: self.processes,
            peak_bytes: self.ended_bytes + living,
            names: self.names.clone(),
        }
    }
}

fn counted_bytes(seen: &Seen) -> u64 {
    if seen.looks >= LOOKS { seen.peak_bytes } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, parent: i32, name: &str, mapped_bytes: u64) -> Process {
        Process { pid, parent, name: name.to_owned(), started: 1000 + pid as u64, mapped_bytes }
    }

    #[test]
    fn processes_are_read_whatever_their_name() {
        let rest = "S 7 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5555 8192 12 0";
        let read = Process::parse(&format!("42 (a) b (c) {rest}")).unwrap();
        let expected = Process {
            pid: 42,
            parent: 7,
            name: "a) b (c".into(),
            started: 5555,
            mapped_bytes: 8192,
        };
        assert_eq!(read, expected);
        assert_eq!(Process::parse("42 (a) Z 7 1"), None);
        let own = std::process::id() as i32;
        let all = all_processes();
        assert!(all.iter().any(|process| process.pid == own && process.mapped_bytes > 0));
        assert!(anonymous_bytes(own) > 0);
    }

    #[test]
    fn who_is_outside_counts_once_with_its_peak() {
        let mut watch = Watch::new();
        let attached = HashSet::from([10, 11]);
        let all = [
            process(1, 0, "init", 1),
            process(10, 1, "python3", 100),
            process(11, 10, "sort", 50),
            // Forked just now, a helper, and a stranger.
            process(12, 10, "python3", 100),
            process(13, 10, "hecaton", 100),
            process(14, 1, "sshd", 9),
            process(20, 10, "static", 30),
            process(21, 20, "of-static", 30),
        ];
        watch.look(&attached, &all, |_| 5 << 20);
        assert_eq!(watch.found(), Outside::default(), "they may attach in a moment");
        watch.look(&attached, &all, |pid| if pid == 20 { 7 << 20 } else { 3 << 20 });
        let found = watch.found();
        assert_eq!((found.processes, found.peak_bytes), (2, 12 << 20));
        // The first has ended, and left the other to somebody else.
        let mut left = all[..7].to_vec();
        left[6] = process(21, 1, "of-static", 30);
        watch.look(&attached, &left, |_| 6 << 20);
        let mut found = watch.found();
        found.names.sort();
        let names = ["of-static".to_owned(), "static".to_owned()];
        let expected = Outside { processes: 2, peak_bytes: 13 << 20, names: names.into() };
        assert_eq!(found, expected);
        watch.look(&HashSet::new(), &[], |_| 0);
        assert_eq!(watch.found().peak_bytes, 13 << 20);
    }
}
