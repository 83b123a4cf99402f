//! Measures the cost of policy decisions in a large cluster.
//!
//! All nodes are in one process: statistics go in, targets and grants come out. The yardstick is
//! one pass over the same statistics, the least that any decision needs. [`heartbeats`] measures
//! one second of a manager's work for as many nodes as a manager takes.

mod heartbeats;

use crate::bench::control::reporter::HOME_PAGES;
use crate::terminal::table::Table;
use anyhow::Context as _;
use hecaton_policy::cluster::account::ConsumerStatistics;
use hecaton_policy::cluster::grants::{self, Need, Tlp};
use hecaton_policy::cluster::membership::Membership;
use hecaton_policy::cluster::message::{Block, Holdings, ToManager};
use hecaton_policy::cluster::targets::{
    Decision, FirstLevel, Policy, Situation, anticipating, tlp,
};
use hecaton_policy::cluster::{ConsumerId, Home, NodeId};
use serde::Serialize;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Number of other nodes that each node borrows from.
const LENDERS: u32 = 4;

/// Arguments of `hecaton bench policy`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Nodes of the cluster.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    #[arg(value_parser = clap::value_parser!(u32).range(8..=100_000))]
    nodes: u32,
    /// Consumers of each node.
    #[arg(long, value_name = "N", default_value_t = 100)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    consumers: u32,
    /// Seconds of the cluster's time that are decided; what counts is the median.
    #[arg(long, value_name = "N", default_value_t = 9)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// Medians of the rounds, in seconds on one processor.
#[derive(Serialize)]
struct Figures {
    nodes: u32,
    consumers: u64,
    rounds: u32,
    /// One pass over all consumers' statistics.
    pass_s: f64,
    /// The first level of all nodes together.
    tlp_first_level_s: f64,
    anticipating_first_level_s: f64,
    /// The manager takes in the statistics of all nodes.
    ingest_s: f64,
    nodes_ingested_per_s: f64,
    /// The manager's second level, with half of the nodes in need.
    tlp_second_level_s: f64,
    anticipating_second_level_s: f64,
    /// Grants of one round.
    tlp_grants: usize,
    anticipating_grants: usize,
    /// One more node joins: messages, and the time to make them.
    join_messages: usize,
    join_s: f64,
    /// All nodes join, one after the other.
    form_s: f64,
    /// Resident memory of the manager's state, and of the first levels of all nodes together.
    manager_bytes: u64,
    anticipating_memory_bytes: u64,
    /// The manager with its registry and its overview for people.
    heartbeats: heartbeats::Figures,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let figures = measure(args)?;
    if args.json {
        println!("{}", serde_json::to_string(&figures)?);
    } else {
        print!("{}", figures.table());
    }
    Ok(())
}

fn measure(args: &Args) -> anyhow::Result<Figures> {
    let heartbeats = heartbeats::measure(args.nodes, args.consumers, args.rounds)?;
    let mut random = Random(1);
    let mut statistics: Vec<Vec<ConsumerStatistics>> = (0..args.nodes)
        .map(|node| (0..args.consumers).map(|at| consumer(node, at, args.consumers)).collect())
        .collect();

    let before = resident_bytes()?;
    let began = Instant::now();
    let mut membership = Membership::default();
    for node in nodes(args.nodes) {
        black_box(membership.handle(node, ToManager::Register { life: 1 }));
    }
    let form_s = began.elapsed().as_secs_f64();
    for node in nodes(args.nodes) {
        membership.handle(node, ToManager::Statistics(holdings(args.nodes, node, &mut random)));
    }
    let manager_bytes = resident_bytes()?.saturating_sub(before);

    let (tlp, own) = (tlp::Settings::default(), anticipating::Settings::default());
    let mut by_tlp = vec![FirstLevel::new(Policy::Tlp(tlp)); args.nodes as usize];
    let mut by_own = vec![FirstLevel::new(Policy::Anticipating(own)); args.nodes as usize];
    let mut times: [Vec<Duration>; 6] = Default::default();
    let (mut tlp_grants, mut anticipating_grants) = (0, 0);
    let mut decision = Decision::default();
    let before = resident_bytes()?;
    let mut anticipating_memory_bytes = 0;
    for _ in 0..args.rounds {
        for consumer in statistics.iter_mut().flatten() {
            happen(consumer, &mut random);
        }
        let all = || statistics.iter().flatten();
        times[0].push(timed(|| {
            black_box(
                all().map(|consumer| consumer.used_pages + consumer.puts_failed()).sum::<u64>(),
            );
        }));
        let mut first = |levels: &mut [FirstLevel]| {
            timed(|| {
                for (level, consumers) in levels.iter_mut().zip(&statistics) {
                    let total_pages = HOME_PAGES;
                    level.decide(
                        &Situation { total_pages, owed_pages: 0, consumers },
                        &mut decision,
                    );
                    black_box(&decision);
                }
            })
        };
        times[1].push(first(&mut by_tlp));
        times[2].push(first(&mut by_own));
        anticipating_memory_bytes = resident_bytes()?.saturating_sub(before);

        let reports: Vec<(NodeId, Holdings)> =
            nodes(args.nodes).map(|node| (node, holdings(args.nodes, node, &mut random))).collect();
        times[3].push(timed(|| {
            for (node, report) in reports {
                black_box(membership.handle(node, ToManager::Statistics(report)));
            }
        }));
        times[4].push(timed(|| {
            let free = membership.active().map(|(node, holdings)| (node, holdings.free_pages));
            let mut level = Tlp::new(tlp.reserve_pages, free);
            let mut forwards = Vec::new();
            for (node, holdings) in membership.active() {
                let total = owned_pages(holdings);
                if holdings.wanted_pages > total {
                    level.request(node, holdings.wanted_pages - total, &mut forwards);
                }
            }
            tlp_grants = forwards.len();
        }));
        times[5].push(timed(|| {
            let need = |(node, holdings): (NodeId, &Holdings)| Need {
                node,
                home_pages: holdings.home_pages,
                total_pages: owned_pages(holdings),
                free_pages: holdings.free_pages,
                wanted_pages: holdings.wanted_pages,
            };
            let needs: Vec<Need> = membership.active().map(need).collect();
            let forwards = grants::rebalance(&needs, own.reserve_pages, own.minimum_pages);
            anticipating_grants = forwards.len();
        }));
    }
    let mut join_messages = 0;
    let join_s = timed(|| {
        let register = ToManager::Register { life: 1 };
        join_messages = membership.handle(NodeId(args.nodes + 1), register).len();
    });
    let [pass_s, tlp_first_level_s, anticipating_first_level_s, ingest_s, second_tlp, second_own] =
        times.map(median_s);
    Ok(Figures {
        nodes: args.nodes,
        consumers: u64::from(args.nodes) * u64::from(args.consumers),
        rounds: args.rounds,
        pass_s,
        tlp_first_level_s,
        anticipating_first_level_s,
        ingest_s,
        nodes_ingested_per_s: f64::from(args.nodes) / ingest_s,
        tlp_second_level_s: second_tlp,
        anticipating_second_level_s: second_own,
        tlp_grants,
        anticipating_grants,
        join_messages,
        join_s: join_s.as_secs_f64(),
        form_s,
        manager_bytes,
        anticipating_memory_bytes,
        heartbeats,
    })
}

impl Figures {
    fn table(&self) -> String {
        let mut table = Table::figures(["what", "ms", "of a pass", "each"]);
        let consumers = self.consumers as f64;
        let nodes = f64::from(self.nodes);
        let mut row = |what: &str, seconds: f64, of: f64, unit: &str| {
            table.row([
                what.to_owned(),
                format!("{:.2}", seconds * 1e3),
                format!("{:.1}", seconds / self.pass_s),
                format!("{:.0} ns a {unit}", seconds / of * 1e9),
            ]);
        };
        row("one pass over the statistics", self.pass_s, consumers, "consumer");
        row("first level of all nodes, TLP", self.tlp_first_level_s, consumers, "consumer");
        let own_s = self.anticipating_first_level_s;
        row("first level of all nodes, anticipating", own_s, consumers, "consumer");
        row("statistics into the manager", self.ingest_s, nodes, "node");
        row("second level, TLP", self.tlp_second_level_s, nodes, "node");
        row("second level, anticipating", self.anticipating_second_level_s, nodes, "node");
        row("one more node joins", self.join_s, nodes, "node");
        row("all nodes join", self.form_s, nodes, "node");
        format!(
            "{} nodes, {} consumers, median of {} rounds, one processor\n{table}\
             grants in a round: TLP {}, anticipating {}; messages when a node joins: {}\n\
             resident memory: manager {} KiB, first levels of all nodes {} KiB\n\
             a manager of {} nodes, {} consumers, in a second: {:.0} ms to read {} KiB of heartbeats, {:.0} ms to take \
             them in, {:.0} ms to write {} KiB of answers, {:.0} ms to look at it for people; resident memory {} KiB\n\
             when all nodes join at once, they know each other after {} s: {:.1} s in all, {:.2} s in the worst second, \
             {} MiB of answers\n",
            self.nodes,
            self.consumers,
            self.rounds,
            self.tlp_grants,
            self.anticipating_grants,
            self.join_messages,
            self.manager_bytes >> 10,
            self.anticipating_memory_bytes >> 10,
            self.heartbeats.nodes,
            self.heartbeats.consumers,
            self.heartbeats.read_s * 1e3,
            self.heartbeats.heard_bytes >> 10,
            self.heartbeats.registry_s * 1e3,
            self.heartbeats.write_s * 1e3,
            self.heartbeats.said_bytes >> 10,
            self.heartbeats.look_s * 1e3,
            self.heartbeats.state_bytes >> 10,
            self.heartbeats.form_seconds,
            self.heartbeats.form_s,
            self.heartbeats.form_most_s,
            self.heartbeats.form_said_bytes >> 20,
        )
    }
}

fn nodes(count: u32) -> impl Iterator<Item = NodeId> {
    (1..=count).map(NodeId)
}

fn consumer(node: u32, at: u32, of: u32) -> ConsumerStatistics {
    ConsumerStatistics {
        id: ConsumerId(u64::from(node) << 32 | u64::from(at)),
        used_pages: HOME_PAGES / u64::from(of) / 2,
        target_pages: Some(HOME_PAGES / u64::from(of)),
        puts_total: 0,
        puts_succeeded: 0,
        gets: 0,
    }
}

/// One second of a consumer: its size changes, one in eight has failed puts, one in four is idle.
fn happen(consumer: &mut ConsumerStatistics, random: &mut Random) {
    let mood = random.below(8);
    let target = consumer.target_pages.unwrap_or(0);
    consumer.puts_total = if mood < 6 { random.below(4096) } else { 0 };
    consumer.puts_succeeded = if mood == 0 { consumer.puts_total / 2 } else { consumer.puts_total };
    consumer.gets = if mood < 6 { random.below(4096) } else { 0 };
    consumer.used_pages =
        (consumer.used_pages + random.below(8192)).saturating_sub(4096).min(target);
}

/// Holdings of a node that lent some memory and borrowed some; about half of the nodes are in need.
fn holdings(count: u32, node: NodeId, random: &mut Random) -> Holdings {
    let lent = HOME_PAGES / 8;
    let at = |step: u32| NodeId((node.0 - 1 + step * (count / 8).max(1)) % count + 1);
    let block = |node, pages| Block { home: Home { node, life: 1 }, pages };
    let mut owned = vec![block(node, HOME_PAGES - u64::from(LENDERS) * lent / 2)];
    owned.extend((1..=LENDERS).map(|step| block(at(step), lent / 2)));
    let is_in_need = random.below(2) == 0;
    let part = HOME_PAGES / 16;
    Holdings {
        life: 1,
        messages_handled: 0,
        home_pages: HOME_PAGES,
        free_pages: if is_in_need { random.below(part) } else { 4 * part + random.below(8 * part) },
        wanted_pages: if is_in_need {
            16 * part + random.below(8 * part)
        } else {
            random.below(8 * part)
        },
        owned,
    }
}

fn owned_pages(holdings: &Holdings) -> u64 {
    holdings.owned.iter().map(|block| block.pages).sum()
}

fn timed(act: impl FnOnce()) -> Duration {
    let began = Instant::now();
    act();
    began.elapsed()
}

fn median_s(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}

fn resident_bytes() -> anyhow::Result<u64> {
    let status =
        std::fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10).context("/proc/self/status has no VmRSS")
}

/// Pseudo-random numbers, the same in each run (Marsaglia's xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_cluster_is_measured_whole() {
        let args = Args { nodes: 16, consumers: 4, rounds: 2, json: false };
        let figures = measure(&args).unwrap();
        assert_eq!((figures.nodes, figures.consumers), (16, 64));
        assert_eq!(figures.join_messages, 2 * 16 + 1, "the new one hears of all, all hear of it");
        assert!(figures.tlp_grants > 0 && figures.anticipating_grants > 0);
        assert_eq!((figures.heartbeats.nodes, figures.heartbeats.consumers), (16, 64));
        assert!(figures.table().contains("second level, TLP"));
    }
}
