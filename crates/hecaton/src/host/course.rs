//! Extracts per-class memory and VM histories from `hecaton host watch --json` recordings.

use hecaton_broker::NewcomerKind;
use hecaton_node::agent::{AgentReport, MachineState};
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// State of one host at one moment: one line of a recording.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Sample {
    /// Time of the sample, in milliseconds since 1970.
    unix_ms: u64,
    #[serde(flatten)]
    report: AgentReport,
}

/// A recording.
#[derive(Debug, Default)]
pub(super) struct Course {
    begun_unix_ms: u64,
    /// Seconds since the recording began, one per sample, in order.
    pub(super) times_s: Vec<f64>,
    pub(super) nodes: Vec<NodeCourse>,
    /// In the order of first appearance.
    pub(super) lives: Vec<Life>,
}

/// A NUMA node's memory.
#[derive(Debug)]
pub(super) struct NodeCourse {
    /// The kernel's number of the node.
    pub(super) node: u32,
    /// Bytes by class, one value per sample.
    pub(super) classes: Vec<(&'static str, Vec<u64>)>,
}

/// A VM, from its request for memory to its end.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) name: String,
    pub(super) kind: NewcomerKind,
    /// Without harvested memory.
    pub(super) bytes: u64,
    /// `None` while the VM waits.
    pid: Option<u32>,
    /// Each with its start in seconds; at least one.
    pub(super) stages: Vec<(f64, Stage)>,
    /// `None` if the last sample still has the VM.
    pub(super) ended_s: Option<f64>,
}

/// Stage in the life of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The VM waits for admission.
    Waits,
    /// The VM was admitted.
    Runs,
    /// The host needs the VM's minimum for other VMs, or is evicting the VM for them.
    Warned,
}

impl Sample {
    /// Stamps `report` with the current time.
    pub(super) fn now(report: AgentReport) -> Sample {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Sample { unix_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX), report }
    }
}

impl Course {
    /// Appends the next sample.
    pub(super) fn add(&mut self, sample: &Sample) {
        if self.times_s.is_empty() {
            self.begun_unix_ms = sample.unix_ms;
        }
        let since = Duration::from_millis(sample.unix_ms.saturating_sub(self.begun_unix_ms));
        // The wall clock can be set back; times here must not go back.
        let now_s = self.times_s.last().map_or(0.0, |last| since.as_secs_f64().max(*last));
        let report = &sample.report;
        for memory in &report.nodes {
            let known = self.nodes.iter().position(|known| known.node == memory.node);
            let at = known.unwrap_or_else(|| {
                let before = vec![0; self.times_s.len()];
                let classes = memory.classes().map(|(class, _)| (class, before.clone()));
                self.nodes.push(NodeCourse { node: memory.node, classes: classes.into() });
                self.nodes.len() - 1
            });
            for ((_, values), (_, bytes)) in self.nodes[at].classes.iter_mut().zip(memory.classes())
            {
                values.push(bytes);
            }
        }
        self.times_s.push(now_s);
        // A node that this sample lacks has zeros.
        for (_, values) in self.nodes.iter_mut().flat_map(|node| &mut node.classes) {
            values.resize(self.times_s.len(), 0);
        }
        self.follow(report, now_s);
    }

    fn follow(&mut self, report: &AgentReport, now_s: f64) {
        let is_there = |life: &Life| match life.pid {
            None => {
                report.waiting.iter().any(|newcomer| newcomer.name == life.name)
                // An admitted VM is the one that waited.
                || report.machines.iter().any(|machine| machine.name == life.name)
            }
            Some(pid) => report.machines.iter().any(|it| it.name == life.name && it.pid == pid),
        };
        for life in self.lives.iter_mut().filter(|life| life.ended_s.is_none()) {
            if !is_there(life) {
                life.ended_s = Some(now_s);
            }
        }
        for machine in &report.machines {
            let stage = match machine.state {
                MachineState::Starting | MachineState::Running | MachineState::Silent => {
                    Stage::Runs
                }
                MachineState::Warned | MachineState::ShuttingDown | MachineState::Evicted => {
                    Stage::Warned
                }
            };
            let life = self.life(&machine.name, machine.kind, machine.base_bytes);
            life.pid = Some(machine.pid);
            life.enter(stage, now_s);
        }
        for newcomer in &report.waiting {
            self.life(&newcomer.name, newcomer.kind, newcomer.bytes).enter(Stage::Waits, now_s);
        }
    }

    /// Finds the live VM of this name, or adds one.
    fn life(&mut self, name: &str, kind: NewcomerKind, bytes: u64) -> &mut Life {
        let is_it = |life: &Life| life.name == name && life.ended_s.is_none();
        let at = self.lives.iter().position(is_it).unwrap_or_else(|| {
            let (name, stages) = (name.to_owned(), Vec::new());
            self.lives.push(Life { name, kind, bytes, pid: None, stages, ended_s: None });
            self.lives.len() - 1
        });
        &mut self.lives[at]
    }
}

impl Life {
    fn enter(&mut self, stage: Stage, now_s: f64) {
        if self.stages.last().is_none_or(|(_, last)| *last != stage) {
            self.stages.push((now_s, stage));
        }
    }

    /// Events of the VM, each with its time in seconds.
    pub(super) fn events(&self) -> Vec<(f64, String)> {
        let mut events = Vec::new();
        let mut before: Option<(f64, Stage)> = None;
        for &(at_s, stage) in &self.stages {
            let what = match (before, stage) {
                (None, Stage::Runs) if at_s == 0.0 => "is there".to_owned(),
                (None, Stage::Runs) => "starts at once".to_owned(),
                (_, Stage::Waits) => "asks for memory".to_owned(),
                (Some((asked_s, Stage::Waits)), Stage::Runs) => {
                    format!("starts, after {:.0} s", at_s - asked_s)
                }
                (Some(_), Stage::Runs) => "is spared".to_owned(),
                (_, Stage::Warned) => "is warned".to_owned(),
            };
            events.push((at_s, what));
            before = Some((at_s, stage));
        }
        if let Some(ended_s) = self.ended_s {
            let what = match before {
                Some((_, Stage::Warned)) => "is evicted",
                Some((_, Stage::Waits)) => "waits no longer",
                _ => "has left",
            };
            events.push((ended_s, what.to_owned()));
        }
        events
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use hecaton_broker::{Counters, NodeLedger};
    use hecaton_node::agent::{MachineReport, NewcomerReport, NodeMemoryReport};

    fn machine(name: &str, pid: u32, state: MachineState) -> MachineReport {
        MachineReport {
            name: name.into(),
            kind: NewcomerKind::Harvest,
            state,
            pid,
            cgroup: None,
            base_bytes: 1 << 30,
            max_bytes: 2 << 30,
            requested_bytes: 0,
            harvested_bytes: 0,
            held_bytes: 0,
            cores: 0,
            cores_failure: None,
            nodes: Vec::new(),
            waited_ms: None,
            guest_listens: None,
        }
    }

    fn newcomer(name: &str) -> NewcomerReport {
        NewcomerReport {
            name: name.into(),
            kind: NewcomerKind::Regular,
            bytes: 3 << 30,
            cores: 0,
            waiting_ms: 0,
            waits: None,
        }
    }

    fn sample(
        at_s: u64,
        harvested_bytes: u64,
        machines: Vec<MachineReport>,
        waiting: Vec<NewcomerReport>,
    ) -> Sample {
        let ledger = NodeLedger { total_bytes: 4 << 30, harvested_bytes, ..NodeLedger::default() };
        let node =
            NodeMemoryReport { node: 0, host_bytes: 8 << 30, unmanaged_bytes: 4 << 30, ledger };
        Sample {
            unix_ms: 1_700_000_000_000 + at_s * 1000,
            report: AgentReport {
                qmp_dir: "/run/vms".into(),
                buffer_bytes: 0,
                nodes: vec![node],
                cores: Default::default(),
                machines,
                waiting,
                gave_way: Vec::new(),
                counters: Counters::default(),
                harvest: Default::default(),
                libvirt: None,
            },
        }
    }

    /// A harvest VM is evicted for a regular VM, and comes back.
    pub(in super::super) fn eviction() -> Vec<Sample> {
        use MachineState::{Evicted, Running, Starting, Warned};
        vec![
            sample(0, 1 << 30, vec![machine("h", 1, Running)], vec![]),
            sample(1, 1 << 30, vec![machine("h", 1, Running)], vec![newcomer("<r>")]),
            sample(2, 0, vec![machine("h", 1, Warned)], vec![newcomer("<r>")]),
            sample(3, 0, vec![machine("h", 1, Evicted)], vec![newcomer("<r>")]),
            sample(4, 0, vec![machine("<r>", 2, Starting)], vec![]),
            sample(5, 0, vec![machine("<r>", 2, Running)], vec![newcomer("h")]),
            sample(6, 0, vec![machine("h", 3, Starting)], vec![]),
        ]
    }

    pub(in super::super) fn course(samples: &[Sample]) -> Course {
        let mut course = Course::default();
        samples.iter().for_each(|sample| course.add(sample));
        course
    }

    #[test]
    fn each_machine_is_followed_from_its_asking_to_its_end() {
        let course = course(&eviction());
        let lives = course.lives.iter().map(|life| {
            let events = life.events().into_iter().map(|(at_s, what)| format!("{at_s} {what}"));
            (life.name.as_str(), events.collect::<Vec<_>>().join(", "))
        });
        assert_eq!(
            lives.collect::<Vec<_>>(),
            [
                ("h", "0 is there, 2 is warned, 4 is evicted".to_owned()),
                ("<r>", "1 asks for memory, 4 starts, after 3 s, 6 has left".to_owned()),
                ("h", "5 asks for memory, 6 starts, after 1 s".to_owned()),
            ]
        );
    }

    #[test]
    fn a_warning_that_is_lifted_and_a_machine_that_takes_anothers_name() {
        use MachineState::{Running, Warned};
        let of = |at_s, pid, state| sample(at_s, 0, vec![machine("h", pid, state)], vec![]);
        let course =
            course(&[of(0, 1, Running), of(1, 1, Warned), of(2, 1, Running), of(3, 2, Running)]);
        let events = |at: usize| course.lives[at].events().into_iter().map(|(_, what)| what);
        assert_eq!(
            events(0).collect::<Vec<_>>(),
            ["is there", "is warned", "is spared", "has left"]
        );
        assert_eq!(events(1).collect::<Vec<_>>(), ["starts at once"]);
    }

    #[test]
    fn times_do_not_go_back_and_nodes_may_be_away() {
        let mut samples: Vec<Sample> = [5, 7, 6].map(|at| sample(at, 9, vec![], vec![])).into();
        samples[1].report.nodes.clear();
        samples[2].report.nodes[0].node = 1;
        let course = course(&samples);
        assert_eq!(course.times_s, [0.0, 2.0, 2.0]);
        let harvested = |at: usize| {
            let classes = &course.nodes[at].classes;
            classes.iter().find(|(class, _)| *class == "harvested").unwrap().1.clone()
        };
        assert_eq!(harvested(0), [9, 0, 0]);
        assert_eq!(harvested(1), [0, 0, 9]);
    }
}
