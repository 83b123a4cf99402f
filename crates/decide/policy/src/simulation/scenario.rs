//! Builds the paper's scenarios (table IV), and two that the paper does not have.
//!
//! Recorded programs of the same kind stand for the paper's ([`super::demand`]); each second is a
//! phase. Their parameters make the machines of a node want more than its 1 GiB of pool, as the
//! paper's results imply: 1.5 times as much in scenarios 1 and 4, two to three times in the others.

use super::demand::{Demands, Second};
use super::machine::{MIB, Machine, Phase};
use crate::cluster::{ConsumerId, NodeId};
use hecaton_memory::SplitMix;
use serde::Serialize;

/// RAM that a guest's system needs for itself, out of the table's sizes.
const GUEST_SYSTEM_MIB: u64 = 128;

/// An event, and the second in which it happens.
pub(super) type Event = (u64, Happening);

/// Something that can happen to a cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Happening {
    /// A node leaves in good order.
    Leaves(NodeId),
    /// A node joins again.
    Joins(NodeId),
    /// A node crashes without notice.
    Crashes(NodeId),
    /// A node starts again after a crash.
    Returns(NodeId),
    /// The manager restarts without state.
    ManagerRestarts,
}

/// One of the built-in scenarios.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scenario {
    /// Three machines run in-memory analytics twice.
    S1,
    /// Three machines run graph analytics once.
    S2,
    /// Two machines run graph analytics twice, one in-memory analytics.
    S3,
    /// Graph analytics beside a data-caching client and its server.
    S4,
    /// Machines whose bursts of demand take turns. Not in the paper.
    Turns,
    /// Graph analytics while one donor leaves and joins again, another fails and comes back, and
    /// the manager restarts. Not in the paper.
    Churn,
}

/// A node of a scenario, with what runs on it.
pub(super) struct NodePlan {
    pub(super) pool_pages: u64,
    pub(super) machines: Vec<Machine>,
}

impl Scenario {
    /// All scenarios.
    pub const ALL: [Scenario; 6] =
        [Scenario::S1, Scenario::S2, Scenario::S3, Scenario::S4, Scenario::Turns, Scenario::Churn];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Scenario::S1 => "1",
            Scenario::S2 => "2",
            Scenario::S3 => "3",
            Scenario::S4 => "4",
            Scenario::Turns => "turns",
            Scenario::Churn => "churn",
        }
    }

    /// A description in a few words.
    pub fn description(self) -> &'static str {
        match self {
            Scenario::S1 => "three machines a node: in-memory analytics, twice",
            Scenario::S2 => "three machines a node: graph analytics, once",
            Scenario::S3 => {
                "graph analytics twice on two machines, in-memory analytics twice on one"
            }
            Scenario::S4 => "graph analytics, data-caching client, data-caching server",
            Scenario::Turns => "four machines a node whose bursts take turns",
            Scenario::Churn => {
                "scenario 2, while lenders leave, fail and return, and the manager restarts"
            }
        }
    }

    /// The nodes that run machines, all alike; the other nodes only lend.
    pub fn busy_nodes(self) -> [NodeId; 2] {
        [NodeId(3), NodeId(4)]
    }

    /// The nodes from node 1 on. `seed` shifts the machines' starts by up to 2 s and the programs'
    /// speeds by up to 3 %, as no two runs of a real program are alike.
    pub(super) fn nodes(self, demands: &Demands, seed: u64) -> Vec<NodePlan> {
        let nodes = if self == Scenario::Churn { 6 } else { 4 };
        let mut random = SplitMix::new(seed);
        let plan = |id: u32| {
            let busy = self.busy_nodes().contains(&NodeId(id));
            let machines = if busy { self.machines(id, demands, &mut random) } else { Vec::new() };
            let pool_mib = if self == Scenario::Churn && !busy { 768 } else { 1024 };
            NodePlan { pool_pages: pool_mib * MIB, machines }
        };
        (1..=nodes).map(plan).collect()
    }

    /// The events, in order of time.
    pub(super) fn events(self) -> Vec<Event> {
        match self {
            Scenario::Churn => vec![
                (20, Happening::Leaves(NodeId(5))),
                (35, Happening::Crashes(NodeId(6))),
                (50, Happening::ManagerRestarts),
                (65, Happening::Returns(NodeId(6))),
                (80, Happening::Joins(NodeId(5))),
            ],
            _ => Vec::new(),
        }
    }

    fn machines(self, node: u32, demands: &Demands, random: &mut SplitMix) -> Vec<Machine> {
        use Program::{Burst, CachingClient, CachingServer, Graph, InMemory};
        let twice = |program| vec![program, program];
        // (RAM in MiB, programs, seconds of sleep in between), as in table IV.
        let plans: Vec<(u64, Vec<Program>, f64)> = match self {
            Scenario::S1 => vec![
                (768, twice(InMemory), 5.0),
                (1024, twice(InMemory), 5.0),
                (1024, twice(InMemory), 5.0),
            ],
            Scenario::S2 | Scenario::Churn => {
                vec![(768, vec![Graph], 0.0), (768, vec![Graph], 0.0), (768, vec![Graph], 0.0)]
            }
            Scenario::S3 => vec![
                (768, twice(Graph), 0.0),
                (768, twice(Graph), 0.0),
                (1024, twice(InMemory), 0.0),
            ],
            Scenario::S4 => vec![
                (768, vec![Graph], 0.0),
                (512, vec![CachingClient], 0.0),
                (512, vec![CachingServer], 0.0),
            ],
            Scenario::Turns => vec![(512, vec![Burst; 4], 60.0); 4],
        };
        let mut machines = Vec::new();
        for (at, (ram_mib, programs, sleep_s)) in plans.into_iter().enumerate() {
            let shift_s = match self {
                Scenario::Turns => 20.0 * at as f64,
                _ => 0.0,
            };
            let mut phases = vec![Phase::Sleep { seconds: shift_s + 2.0 * unit(random) }];
            for (run, program) in programs.into_iter().enumerate() {
                if run > 0 && sleep_s > 0.0 {
                    phases.push(Phase::Sleep { seconds: sleep_s });
                }
                let pace = 0.97 + 0.06 * unit(random);
                phases.push(Phase::Begin);
                phases.extend(program.phases(demands, pace));
                phases.push(Phase::End);
            }
            // The paper's numbering: its VM1 is Dom0 in the figures.
            let name = format!("VM{}", at + 2);
            let id = ConsumerId(u64::from(node) * 100 + at as u64);
            let ram_pages = (ram_mib - GUEST_SYSTEM_MIB) * MIB;
            machines.push(Machine::new(id, name, ram_pages, true, phases));
        }
        machines
    }
}

#[derive(Clone, Copy)]
enum Program {
    InMemory,
    Graph,
    CachingClient,
    CachingServer,
    Burst,
}

impl Program {
    /// The phases of the program, where a second of work takes `pace` seconds.
    fn phases(self, demands: &Demands, pace: f64) -> Vec<Phase> {
        let recorded = match self {
            Program::InMemory => &demands.in_memory,
            Program::Graph => &demands.graph,
            Program::CachingClient => &demands.caching_client,
            Program::CachingServer => &demands.caching_server,
            Program::Burst => return burst(pace),
        };
        let work = |second: &Second| Phase::Work {
            work_s: pace,
            footprint_pages: second.footprint_pages,
            touches_per_s: second.touched_pages as f64 / pace,
        };
        recorded.iter().map(work).collect()
    }
}

/// Invented phases for machines that take turns.
fn burst(pace: f64) -> Vec<Phase> {
    let work = |work_s: f64, mib: u64, touches_per_s| Phase::Work {
        work_s: work_s * pace,
        footprint_pages: mib * MIB,
        touches_per_s,
    };
    vec![work(3.0, 400, 500.0), work(3.0, 1400, 2000.0), work(10.0, 1400, 4000.0)]
}

/// From 0 to 1.
fn unit(random: &mut SplitMix) -> f64 {
    (random.draw() >> 11) as f64 / (1u64 << 53) as f64
}
