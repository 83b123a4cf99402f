//! Remembers rates, happenings, alarm start times and ten minutes of pool history.
//!
//! Pure: time comes in with the status, about once a second. Nothing here is durable: a restarted
//! manager begins with nothing. Every collection is bounded, whatever nodes report.

use crate::registry::{ClusterStatus, NodeState};
use crate::watching::alarms::{Standing, alarms};
use crate::watching::overview::{
    Alarm, Happening, Overview, Rates, Severity, consumer_id, each, overview, volume_id,
};
use hecaton_node::pagers::ConsumerReport;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

/// Time between two samples of the history.
pub const TICK_MS: u64 = 2000;

/// Samples that are kept: ten minutes.
pub const HISTORY_TICKS: usize = 300;

/// Most consumers and volumes whose history is kept, including those that have ended.
const MAX_SERIES: usize = 1024;

/// Most consumers and volumes whose rates are computed.
const MAX_RATES: usize = 1 << 17;

/// Rates are averaged over this time, so that the moments of reports do not make them jump.
const RATE_WINDOW_MS: u64 = 4000;

/// Most happenings that are kept.
const MAX_HAPPENINGS: usize = 100;

/// Most happenings that one look adds: a large cluster that starts is not listed item by item.
const MAX_AT_ONCE: usize = 20;

/// How long the restart of a donor, pager or volume process stands as an alarm, although its
/// successor serves. A repair of damaged pages stands as long.
const RESTART_STANDS_MS: u64 = 5 * 60 * 1000;

/// The pool over the last ten minutes; the answer to `GET /v1/history`. All lists end at `tick` and
/// may be shorter than [`HISTORY_TICKS`]; a value that was unknown at a tick is null.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// The number of the last sample.
    pub tick: u64,
    /// Time between two samples.
    pub tick_ms: u64,
    /// Samples that are kept at most.
    pub ticks: usize,
    /// Faults per second, of all consumers.
    pub faults_per_s: Vec<Option<f64>>,
    /// Bytes in the pool by consumer or volume, as
    /// [`ConsumerView::id`](crate::watching::overview::ConsumerView::id) names it. Those that have
    /// ended remain until their last sample is too old.
    pub pool_bytes: BTreeMap<String, Vec<Option<u64>>>,
}

/// Compares each status of the cluster with the one before, and keeps the history.
#[derive(Debug, Default)]
pub struct Watch {
    before: Option<ClusterStatus>,
    counters: HashMap<String, VecDeque<Count>>,
    rates: Rates,
    standing_since: HashMap<(String, &'static str), u64>,
    happenings: VecDeque<Happening>,
    tick: u64,
    ticked_ms: Option<u64>,
    faults: VecDeque<Option<f64>>,
    series: BTreeMap<String, VecDeque<Option<u64>>>,
}

/// The value of a counter at one moment.
#[derive(Clone, Copy, Debug)]
struct Count {
    at_ms: u64,
    value: u64,
}

impl Watch {
    /// Records a status and returns the overview to show. Call this about once a second.
    pub fn look(&mut self, status: ClusterStatus) -> Overview {
        let now_ms = status.uptime_ms;
        self.measure(&status);
        if let Some(before) = &self.before {
            let mut news = happenings(before, &status);
            news.truncate(MAX_AT_ONCE);
            self.happenings.extend(news);
            let over = self.happenings.len().saturating_sub(MAX_HAPPENINGS);
            self.happenings.drain(..over);
        }
        let mut view = overview(&status, &self.rates);
        if self.ticked_ms.is_none_or(|at| now_ms.saturating_sub(at) >= TICK_MS) {
            self.ticked_ms = Some(now_ms);
            self.sample(&status, view.totals.faults_per_s);
        }
        view.tick = self.tick;
        view.alarms = self.alarms(&status);
        view.happenings = self.happenings.iter().rev().cloned().collect();
        self.before = Some(status);
        view
    }

    /// The last ten minutes.
    pub fn history(&self) -> History {
        let series =
            |(id, values): (&String, &VecDeque<_>)| (id.clone(), values.iter().copied().collect());
        History {
            tick: self.tick,
            tick_ms: TICK_MS,
            ticks: HISTORY_TICKS,
            faults_per_s: self.faults.iter().copied().collect(),
            pool_bytes: self.series.iter().map(series).collect(),
        }
    }

    /// Computes rates from counters. A report that was seen before adds nothing. A counter that
    /// went back belongs to another incarnation, so its samples start anew.
    fn measure(&mut self, status: &ClusterStatus) {
        let mut counters = HashMap::new();
        let mut rates = Rates::new();
        for node in status.nodes.iter().filter(|node| node.state == NodeState::Up) {
            let heard_ms = status.uptime_ms.saturating_sub(node.silent_ms);
            let programs = node
                .report
                .consumers
                .iter()
                .filter_map(|one| Some((consumer_id(node, one), one.stats.as_ref()?.faults)));
            let volumes = node.report.volumes.iter().filter_map(|one| {
                let stats = one.stats.as_ref()?;
                Some((volume_id(node, one), stats.reads + stats.writes))
            });
            for (id, value) in programs.chain(volumes) {
                if counters.len() == MAX_RATES {
                    break;
                }
                let mut counts = self.counters.remove(&id).unwrap_or_default();
                if counts.back().is_some_and(|last| value < last.value) {
                    counts.clear();
                }
                // Rounding may change the age of one report between two looks.
                if counts.back().is_none_or(|last| heard_ms > last.at_ms + 10) {
                    counts.push_back(Count { at_ms: heard_ms, value });
                }
                while counts.len() > 2 && heard_ms.saturating_sub(counts[1].at_ms) >= RATE_WINDOW_MS
                {
                    counts.pop_front();
                }
                if let (Some(first), Some(last)) = (counts.front(), counts.back())
                    && last.at_ms > first.at_ms
                {
                    let seconds = (last.at_ms - first.at_ms) as f64 / 1000.0;
                    rates.insert(id.clone(), (last.value - first.value) as f64 / seconds);
                }
                counters.insert(id, counts);
            }
        }
        self.counters = counters;
        self.rates = rates;
    }

    fn sample(&mut self, status: &ClusterStatus, faults_per_s: Option<f64>) {
        self.tick += 1;
        push(&mut self.faults, faults_per_s);
        let mut now = HashMap::new();
        for (node, one) in each(status, |node| &node.report.consumers) {
            let bytes = one.stats.as_ref().map(|stats| stats.pool_bytes);
            now.insert(consumer_id(node, one), bytes.filter(|_| node.state == NodeState::Up));
        }
        for (node, one) in each(status, |node| &node.report.volumes) {
            let bytes = one.stats.as_ref().map(|stats| stats.pool_bytes());
            now.insert(volume_id(node, one), bytes.filter(|_| node.state == NodeState::Up));
        }
        for (id, values) in &mut self.series {
            push(values, now.remove(id).flatten());
        }
        self.series.retain(|_, values| values.iter().any(Option::is_some));
        let room = MAX_SERIES.saturating_sub(self.series.len());
        let new = now.into_iter().filter(|(_, bytes)| bytes.is_some()).take(room);
        self.series.extend(new.map(|(id, bytes)| (id, VecDeque::from([bytes]))));
    }

    fn alarms(&mut self, status: &ClusterStatus) -> Vec<Alarm> {
        let now_ms = status.uptime_ms;
        let standing = alarms(status);
        let key = |one: &Standing| (one.subject.clone(), one.kind);
        let keys: HashSet<_> = standing.iter().map(key).collect();
        self.standing_since.retain(|key, _| keys.contains(key));
        let mut all: Vec<_> = standing
            .into_iter()
            .map(|one| Alarm {
                since_ms: *self.standing_since.entry(key(&one)).or_insert(now_ms),
                severity: one.severity,
                subject: one.subject,
                text: one.text,
            })
            .collect();
        let recent = self.happenings.iter().rev().filter(|one| {
            one.severity == Severity::Warning && now_ms - one.at_ms < RESTART_STANDS_MS
        });
        all.extend(recent.map(|one| Alarm {
            severity: one.severity,
            subject: one.subject.clone(),
            text: one.text.clone(),
            since_ms: one.at_ms,
        }));
        all.sort_by_key(|alarm| alarm.severity);
        all
    }
}

fn push<T>(values: &mut VecDeque<T>, value: T) {
    if values.len() == HISTORY_TICKS {
        values.pop_front();
    }
    values.push_back(value);
}

/// Lists the happenings between two looks.
fn happenings(before: &ClusterStatus, now: &ClusterStatus) -> Vec<Happening> {
    let mut news = Vec::new();
    let mut happened = |severity, subject: &str, text: String| {
        let at_ms = now.uptime_ms;
        news.push(Happening { severity, subject: subject.to_owned(), text, at_ms });
    };
    let known: HashMap<_, _> =
        before.nodes.iter().map(|node| (node.report.name.as_str(), node)).collect();
    let still: HashSet<_> = now.nodes.iter().map(|node| node.report.name.as_str()).collect();
    for gone in before.nodes.iter().filter(|node| !still.contains(node.report.name.as_str())) {
        happened(Severity::Notice, &gone.report.name, "node left the cluster".to_owned());
    }
    for node in &now.nodes {
        let name = &node.report.name;
        let Some(earlier) = known.get(name.as_str()) else {
            happened(Severity::Notice, name, "node joined the cluster".to_owned());
            continue;
        };
        match (earlier.state, node.state) {
            (NodeState::Up, NodeState::Silent) => {
                happened(Severity::Critical, name, "node fell silent".to_owned());
            }
            (NodeState::Silent, NodeState::Up) => {
                happened(Severity::Notice, name, "node is heard from again".to_owned());
            }
            _ => {}
        }
        let restarts: HashMap<_, _> = earlier
            .report
            .donors
            .iter()
            .map(|donor| (donor.name.as_str(), donor.restarts))
            .collect();
        for donor in &node.report.donors {
            if restarts.get(donor.name.as_str()).is_some_and(|count| donor.restarts > *count) {
                let why =
                    donor.last_error.as_ref().map_or(String::new(), |why| format!(" ({why})"));
                let text = format!("donor was lost{why} and started again");
                happened(Severity::Warning, &donor.name, text);
            }
        }
        // A brief report leaves consumers out: one that is not listed may still exist.
        let all_told = earlier.report.untold.is_none() && node.report.untold.is_none();
        let consumers: HashMap<_, _> =
            earlier.report.consumers.iter().map(|one| (one.name.as_str(), one)).collect();
        for consumer in &node.report.consumers {
            let Some(was) = consumers.get(consumer.name.as_str()) else {
                if all_told {
                    let text = format!("began to borrow, on {name}");
                    happened(Severity::Notice, &consumer.name, text);
                }
                continue;
            };
            if consumer.restarts > was.restarts {
                let text = "its pager was lost, and another has taken over".to_owned();
                happened(Severity::Warning, &consumer.name, text);
            }
            let repaired = |one: &ConsumerReport| {
                one.stats.as_ref().map_or(0, |stats| stats.pool.scrub.repaired_pages)
            };
            if repaired(consumer) > repaired(was) {
                let pages = repaired(consumer) - repaired(was);
                let text = format!("{pages} pages had gone bad at a donor and were mended");
                happened(Severity::Warning, &consumer.name, text);
            }
        }
        let told: HashSet<_> = node.report.consumers.iter().map(|one| one.name.as_str()).collect();
        let left = |one: &&ConsumerReport| all_told && !told.contains(one.name.as_str());
        for ended in earlier.report.consumers.iter().filter(left) {
            happened(Severity::Notice, &ended.name, format!("has ended, on {name}"));
        }
        let volumes: HashMap<_, _> = earlier
            .report
            .volumes
            .iter()
            .map(|volume| (volume.name.as_str(), volume.restarts))
            .collect();
        for volume in &node.report.volumes {
            if volumes.get(volume.name.as_str()).is_some_and(|count| volume.restarts > *count) {
                let text = "its process was lost, and another has taken over".to_owned();
                happened(Severity::Warning, &volume.name, text);
            }
        }
    }
    news
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NodeStatus;
    use crate::watching::overview::tests::{donor, node, program, status};

    fn at(uptime_ms: u64, nodes: Vec<NodeStatus>) -> ClusterStatus {
        ClusterStatus { uptime_ms, ..status(nodes) }
    }

    fn with_faults(faults: u64) -> NodeStatus {
        let mut one = program("sort", 1);
        one.stats.as_mut().expect("it has some").faults = faults;
        node("a", vec![donor("d", 1)], vec![one])
    }

    #[test]
    fn a_rate_takes_two_reports() {
        let mut watch = Watch::default();
        let rate = |view: Overview| view.consumers[0].faults_per_s;
        assert_eq!(rate(watch.look(at(1000, vec![with_faults(500)]))), None);
        // The same report, seen again half a second later.
        let same = NodeStatus { silent_ms: 500, ..with_faults(500) };
        assert_eq!(rate(watch.look(at(1500, vec![same]))), None);
        let view = watch.look(at(2000, vec![with_faults(700)]));
        assert_eq!((view.totals.faults_per_s, rate(view)), (Some(200.0), Some(200.0)));
        // A new consumer of the same name starts its counter anew.
        assert_eq!(rate(watch.look(at(3000, vec![with_faults(3)]))), None);
        // The rate of a consumer on a silent node is unknown.
        let silent = NodeStatus { state: NodeState::Silent, silent_ms: 6000, ..with_faults(3) };
        let view = watch.look(at(9000, vec![silent]));
        assert_eq!(rate(view), None);
    }

    #[test]
    fn a_rate_is_that_of_the_last_seconds() {
        let mut watch = Watch::default();
        for second in 1..=20 {
            watch.look(at(second * 1000, vec![with_faults(second.min(10) * 100)]));
        }
        let view = watch.look(at(21_000, vec![with_faults(1000)]));
        assert_eq!(view.consumers[0].faults_per_s, Some(0.0));
        assert!(watch.counters["a/sort"].len() <= 7);
    }

    #[test]
    fn a_donor_that_was_started_again_stands_as_an_alarm_for_a_while() {
        let mut watch = Watch::default();
        watch.look(at(1000, vec![with_faults(1)]));
        let mut after = with_faults(1);
        after.report.donors[0].restarts = 1;
        after.report.donors[0].last_error = Some("killed by signal 9".to_owned());
        let view = watch.look(at(2000, vec![after.clone()]));
        let text = "donor was lost (killed by signal 9) and started again";
        assert_eq!((view.alarms[0].text.as_str(), view.alarms[0].since_ms), (text, 2000));
        assert_eq!(view.happenings[0].text, text);
        let later = watch.look(at(2000 + RESTART_STANDS_MS, vec![after]));
        assert_eq!((later.alarms.len(), later.happenings.len()), (0, 1));
    }

    #[test]
    fn an_alarm_stands_since_it_began() {
        let mut watch = Watch::default();
        let draining = |lent: u64| {
            let mut one = donor("d", lent);
            one.stats.as_mut().expect("it has some").draining = true;
            node("a", vec![one], vec![])
        };
        let since = |view: Overview| view.alarms[0].since_ms;
        assert_eq!(since(watch.look(at(1000, vec![draining(3)]))), 1000);
        assert_eq!(since(watch.look(at(2000, vec![draining(2)]))), 1000, "though its text changed");
        watch.look(at(3000, vec![node("a", vec![donor("d", 1)], vec![])]));
        assert_eq!(since(watch.look(at(4000, vec![draining(1)]))), 4000);
    }

    #[test]
    fn who_comes_and_goes_is_told() {
        let mut watch = Watch::default();
        let texts = |view: Overview| -> Vec<_> {
            view.happenings.into_iter().map(|one| format!("{} {}", one.subject, one.text)).collect()
        };
        assert!(texts(watch.look(at(1000, vec![]))).is_empty());
        watch.look(at(2000, vec![node("a", vec![], vec![])]));
        watch.look(at(3000, vec![with_faults(1)]));
        let silent = NodeStatus { state: NodeState::Silent, ..with_faults(1) };
        watch.look(at(4000, vec![silent]));
        let expected = [
            "a node left the cluster",
            "a node fell silent",
            "sort began to borrow, on a",
            "a node joined the cluster",
        ];
        assert_eq!(texts(watch.look(at(5000, vec![]))), expected);
    }

    #[test]
    fn numbers_that_cannot_be_break_nothing() {
        let most = |name: &str| {
            let mut lends = donor(name, 1);
            lends.lend_bytes = u64::MAX;
            let stats = lends.stats.as_mut().expect("it has some");
            for pages in [
                &mut stats.lent_pages,
                &mut stats.leaving_pages,
                &mut stats.lendable_pages,
                &mut stats.committed_bytes,
                &mut stats.recalled_pages,
                &mut stats.spaces[0].pages,
            ] {
                *pages = u64::MAX;
            }
            let mut borrows = program(name, 1);
            let stats = borrows.stats.as_mut().expect("it has some");
            (stats.pool_bytes, stats.local_bytes, stats.faults) = (u64::MAX, u64::MAX, u64::MAX);
            let mut node = node(name, vec![lends], vec![borrows]);
            node.report.host.available_bytes = u64::MAX;
            node
        };
        let mut watch = Watch::default();
        for state in [NodeState::Up, NodeState::Silent] {
            let mut nodes = vec![most("a"), most("b")];
            nodes[1].state = state;
            let view = watch.look(at(1000, nodes));
            assert_eq!(view.totals.lent_bytes, Some(u64::MAX));
        }
    }

    #[test]
    fn history_is_aligned_and_bounded() {
        let mut watch = Watch::default();
        let mut now = 0;
        let mut step = |watch: &mut Watch, consumers: Vec<&str>| {
            now += TICK_MS;
            let consumers = consumers.into_iter().map(|name| program(name, 1)).collect();
            watch.look(at(now, vec![node("a", vec![], consumers)])).tick
        };
        step(&mut watch, vec!["x"]);
        step(&mut watch, vec!["x", "y"]);
        assert_eq!(step(&mut watch, vec!["y"]), 3);
        let history = watch.history();
        let gib = Some(1 << 30);
        assert_eq!(history.pool_bytes["a/x"], [gib, gib, None]);
        assert_eq!(history.pool_bytes["a/y"], [gib, gib], "the last one is that of now");
        for _ in 0..HISTORY_TICKS {
            step(&mut watch, vec!["y"]);
        }
        let history = watch.history();
        assert_eq!(history.pool_bytes.keys().collect::<Vec<_>>(), ["a/y"], "it is long gone");
        assert_eq!((history.pool_bytes["a/y"].len(), history.faults_per_s.len()), (300, 300));
        let crowd: Vec<_> = (0..MAX_SERIES + 9).map(|number| format!("p{number}")).collect();
        step(&mut watch, crowd.iter().map(String::as_str).collect());
        assert_eq!(watch.history().pool_bytes.len(), MAX_SERIES);
    }
}
