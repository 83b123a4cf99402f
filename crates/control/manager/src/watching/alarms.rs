//! Finds what needs an administrator in a cluster's status. Pure: one status in, alarms out.

use crate::registry::{ClusterStatus, MemberState, NodeState, NodeStatus};
use crate::watching::overview::{Severity, bytes_of};
use Severity::{Critical, Notice, Warning};
use hecaton_memory::Size;
use hecaton_node::cluster::report::NodeReport;
use hecaton_node::donors::{DonorReport, DonorState};
use hecaton_node::pagers::ConsumerReport;
use hecaton_node::vms::{VmReport, VmState};
use hecaton_node::volumes::VolumeReport;
use hecaton_policy::cluster::choice::Named;

/// The pool is nearly full when less than this part of it can be lent.
const POOL_LOW: f64 = 0.1;

/// The pool is about to refuse memory when less than this part of it can be lent.
const POOL_EMPTY: f64 = 0.02;

/// A host is short of memory when less than this part of it is available.
const HOST_LOW: f64 = 0.03;

/// An alarm without its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) severity: Severity,
    pub(crate) subject: String,
    pub(crate) text: String,
    /// The kind of alarm: subject and kind together identify an alarm while its text changes.
    pub(crate) kind: &'static str,
}

fn standing(
    severity: Severity,
    subject: &str,
    kind: &'static str,
    text: impl Into<String>,
) -> Standing {
    Standing { severity, subject: subject.to_owned(), kind, text: text.into() }
}

/// All standing alarms, the most severe first.
pub(crate) fn alarms(status: &ClusterStatus) -> Vec<Standing> {
    let mut alarms = Vec::new();
    let silent = status.nodes.iter().filter(|node| node.state == NodeState::Silent);
    alarms.extend(silent.map(of_silence));
    // The last report of a silent node is out of date; its silence is the alarm.
    let is_up = |node: &&NodeStatus| node.state == NodeState::Up;
    let up = || status.nodes.iter().filter(is_up);
    let reports = || up().map(|node| &node.report);
    alarms.extend(of_manager(status));
    alarms.extend(up().filter_map(of_membership));
    alarms.extend(up().filter_map(of_policy));
    alarms.extend(up().filter_map(of_host));
    alarms.extend(reports().flat_map(|report| &report.donors).flat_map(of_donor));
    alarms.extend(of_pool(reports().flat_map(|report| &report.donors)));
    alarms.extend(reports().flat_map(|report| &report.consumers).flat_map(of_consumer));
    alarms.extend(reports().filter_map(of_untold));
    alarms.extend(reports().flat_map(|report| &report.vms).filter_map(of_machine));
    alarms.extend(reports().flat_map(|report| &report.volumes).flat_map(of_volume));
    alarms.sort_by(|a, b| a.severity.cmp(&b.severity).then_with(|| a.subject.cmp(&b.subject)));
    alarms
}

fn of_silence(node: &NodeStatus) -> Standing {
    let report = &node.report;
    let lent = report.donors.iter().filter_map(|donor| donor.stats.as_ref());
    let lent = lent.fold(0u64, |sum, stats| sum.saturating_add(bytes_of(stats.lent_pages)));
    let seconds = node.silent_ms / 1000;
    let text = match lent {
        0 => format!("node not heard from for {seconds} s"),
        lent => format!("node not heard from for {seconds} s; it had lent {}", Size(lent)),
    };
    standing(Critical, &report.name, "silent", text)
}

fn of_membership(node: &NodeStatus) -> Option<Standing> {
    let text =
        "node recovers: it lends again when nobody counts on what it lent before it was killed";
    let recovers = node.membership == MemberState::Recovery;
    recovers.then(|| standing(Notice, &node.report.name, "recovery", text.to_owned()))
}

/// Warns if the manager is of an earlier version than the policy and does not know it.
fn of_manager(status: &ClusterStatus) -> Option<Standing> {
    let Some(Named::Unknown { policy }) = &status.policy else { return None };
    let way = match &status.policy_instead {
        Some(instead) => format!("goes on by {instead}"),
        None => "hears by what nodes went".to_owned(),
    };
    let text = format!(
        "manager of version {} does not know the policy {policy:?}, and {way}: update it, or set a policy",
        status.version
    );
    Some(standing(Warning, "manager", "policy unknown", text))
}

fn of_policy(node: &NodeStatus) -> Option<Standing> {
    let report = &node.report;
    let own = report.pool.policy.map_or_else(|| "none".to_owned(), |policy| policy.to_string());
    let text = || {
        format!(
            "node of version {} does not know the policy, and goes on by its own, {own}: update it",
            report.version
        )
    };
    let is_unknown = report.pool.is_policy_unknown;
    is_unknown.then(|| standing(Warning, &report.name, "policy unknown", text()))
}

fn of_host(node: &NodeStatus) -> Option<Standing> {
    let host = &node.report.host;
    let is_low = (host.available_bytes as f64) < HOST_LOW * host.memory_bytes as f64;
    let text = || {
        let (available, memory) = (Size(host.available_bytes), Size(host.memory_bytes));
        format!("its host has {available} of {memory} available: recall some of what it lends")
    };
    is_low.then(|| standing(Warning, &node.report.name, "host low", text()))
}

fn of_donor(donor: &DonorReport) -> Vec<Standing> {
    let mut alarms = Vec::new();
    let mut alarm = |severity, kind, text: String| {
        alarms.push(standing(severity, &donor.name, kind, text));
    };
    if donor.state == DonorState::Starting {
        let why = donor.last_error.as_ref().map_or(String::new(), |error| format!(": {error}"));
        alarm(Critical, "starting", format!("donor does not serve{why}"));
    }
    let Some(stats) = &donor.stats else { return alarms };
    let lent = Size(bytes_of(stats.lent_pages.saturating_add(stats.leaving_pages)));
    if stats.draining && lent.0 > 0 {
        alarm(Notice, "draining", format!("donor drains: {lent} to go"));
    } else if stats.draining {
        alarm(Notice, "draining", "donor is drained: it lends nothing".to_owned());
    } else if stats.recalled_pages > 0 {
        let wanted = Size(bytes_of(stats.recalled_pages));
        alarm(Notice, "recalling", format!("donor wants {wanted} back"));
    }
    if let Some(park) = &stats.park {
        let parked = Size(bytes_of(park.parked_pages));
        if park.pages_unreadable > 0 {
            let text = format!("its disk did not give {} parked pages", park.pages_unreadable);
            alarm(Critical, "unreadable", text);
        }
        if let Some(why) = &park.trouble {
            alarm(Warning, "parking", format!("{parked} is parked, no more can be: {why}"));
        } else if parked.0 > 0 {
            alarm(Notice, "parking", format!("{parked} is parked on its disk"));
        }
    }
    if stats.counters.pages_damaged > 0 {
        let pages = stats.counters.pages_damaged;
        let text = format!("memory that goes bad: {pages} damaged pages were found in it");
        alarm(Warning, "damaged", text);
    }
    alarms
}

/// Raises an alarm if the pool has little room left; none while a donor has no statistics.
fn of_pool<'a>(donors: impl Iterator<Item = &'a DonorReport>) -> Option<Standing> {
    let (mut lendable, mut lends) = (0u64, 0u64);
    for donor in donors {
        let stats = donor.stats.as_ref()?;
        lendable = lendable.saturating_add(bytes_of(stats.lendable_pages));
        lends = lends.saturating_add(donor.lend_bytes);
    }
    if lends == 0 || lendable as f64 >= POOL_LOW * lends as f64 {
        return None;
    }
    let text = format!("{} of {} are left to lend: add donors", Size(lendable), Size(lends));
    let is_empty = (lendable as f64) < POOL_EMPTY * lends as f64;
    Some(standing(if is_empty { Critical } else { Warning }, "pool", "full", text))
}

/// Warns of consumers in trouble that are too many for the node to report one by one.
fn of_untold(report: &NodeReport) -> Option<Standing> {
    let in_trouble = report.untold.as_ref()?.in_trouble;
    let text = || {
        format!(
            "{in_trouble} more of its consumers need attention: the metrics of the node itself name them"
        )
    };
    (in_trouble > 0).then(|| standing(Warning, &report.name, "untold", text()))
}

fn of_consumer(consumer: &ConsumerReport) -> Vec<Standing> {
    let Some(stats) = &consumer.stats else { return Vec::new() };
    let pool = &stats.pool;
    let mut alarms = Vec::new();
    let mut alarm = |severity, kind, text: String| {
        alarms.push(standing(severity, &consumer.name, kind, text));
    };
    if pool.lost_bytes > 0 {
        alarm(Critical, "lost", format!("{} of its memory is lost", Size(pool.lost_bytes)));
    }
    if pool.scrub.lost_pages > 0 {
        let pages = pool.scrub.lost_pages;
        alarm(Critical, "damaged", format!("{pages} pages are damaged in every copy"));
    }
    if pool.degraded_bytes > 0 {
        alarm(Warning, "degraded", format!("{} lacks a copy", Size(pool.degraded_bytes)));
    } else if pool.to_move_bytes > 0 {
        alarm(Notice, "moving", format!("{} is to be moved", Size(pool.to_move_bytes)));
    }
    if stats.checksum_errors > 0 {
        let pages = stats.checksum_errors;
        alarm(Warning, "checksum", format!("{pages} pages came back with a wrong checksum"));
    }
    if stats.limit_is_advisory {
        let text = "its memory cannot be taken away: it is not kept to its local limit";
        alarm(Warning, "advisory", text.to_owned());
    }
    alarms
}

fn of_machine(vm: &VmReport) -> Option<Standing> {
    let reason = vm.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
    let text = match vm.state {
        VmState::Stopped => format!("machine was stopped{reason}"),
        VmState::Stuck => format!("machine should be stopped and does not answer{reason}"),
        VmState::Waiting
        | VmState::Running
        | VmState::Paused
        | VmState::Leaving
        | VmState::Detached => return None,
    };
    Some(standing(Critical, &vm.name, "stopped", text))
}

fn of_volume(volume: &VolumeReport) -> Vec<Standing> {
    let Some(stats) = &volume.stats else { return Vec::new() };
    let mut alarms = Vec::new();
    let mut alarm = |severity, kind, text: String| {
        alarms.push(standing(severity, &volume.name, kind, text));
    };
    let bytes = |segments: u64| Size(bytes_of(segments.saturating_mul(stats.pool.segment_pages)));
    if stats.pool.segments_lost > 0 {
        alarm(Critical, "lost", format!("{} of it is lost", bytes(stats.pool.segments_lost)));
    }
    if stats.unkept_bytes > 0 {
        let text =
            format!("{} could not be kept, and fails until written", Size(stats.unkept_bytes));
        alarm(Critical, "unkept", text);
    }
    if stats.pool.segments_degraded > 0 {
        let lacking = bytes(stats.pool.segments_degraded);
        alarm(Warning, "degraded", format!("{lacking} lacks a copy"));
    }
    if stats.unsettled > 0 {
        let text = format!("{} writes wait for a donor that is away", stats.unsettled);
        alarm(Warning, "unsettled", text);
    }
    alarms
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watching::overview::tests::{donor, node, program, status};
    use hecaton_donor::ParkSnapshot;
    use hecaton_pager::Stats;
    use hecaton_policy::cluster::choice::Choice;

    fn texts(status: &ClusterStatus) -> Vec<(Severity, String)> {
        let shown = |one: Standing| (one.severity, format!("{}: {}", one.subject, one.text));
        alarms(status).into_iter().map(shown).collect()
    }

    #[test]
    fn a_cluster_in_order_has_none() {
        let nodes = vec![node("a", vec![donor("a", 1)], vec![program("sort", 1)])];
        assert_eq!(texts(&status(nodes)), []);
    }

    #[test]
    fn the_worst_comes_first() {
        let mut nodes = vec![
            node("a", vec![donor("a", 1)], vec![program("sort", 1)]),
            node("b", vec![donor("b", 2)], vec![]),
        ];
        nodes[1].state = NodeState::Silent;
        nodes[1].silent_ms = 7100;
        let stats = nodes[0].report.consumers[0].stats.as_mut().expect("it has some");
        stats.pool.degraded_bytes = 1 << 30;
        nodes[0].report.donors[0].stats.as_mut().expect("it has some").draining = true;
        let expected = [
            (Critical, "b: node not heard from for 7 s; it had lent 2G"),
            (Warning, "sort: 1G lacks a copy"),
            (Notice, "a: donor drains: 1G to go"),
        ];
        assert_eq!(texts(&status(nodes)), expected.map(|(how, text)| (how, text.to_owned())));
    }

    /// Nodes report consumers in trouble before all others.
    #[test]
    fn whoever_has_an_alarm_is_in_trouble() {
        let changes: [fn(&mut Stats); 6] = [
            |stats| stats.pool.lost_bytes = 1,
            |stats| stats.pool.scrub.lost_pages = 1,
            |stats| stats.pool.degraded_bytes = 1,
            |stats| stats.pool.to_move_bytes = 1,
            |stats| stats.checksum_errors = 1,
            |stats| stats.limit_is_advisory = true,
        ];
        assert!(!program("x", 1).is_in_trouble());
        for change in changes {
            let mut program = program("x", 1);
            change(program.stats.as_mut().expect("it has some"));
            assert!(program.is_in_trouble() && of_consumer(&program).len() == 1);
        }
    }

    #[test]
    fn those_in_trouble_that_are_not_told_of_are_counted() {
        let programs = ["x", "y", "z"].map(|name| {
            let mut program = program(name, 1);
            program.stats.as_mut().expect("it has some").pool.degraded_bytes = 1 << 20;
            program
        });
        let mut nodes = vec![node("a", vec![], programs.into())];
        nodes[0].report = nodes[0].report.clone().in_brief(1);
        let text =
            "a: 2 more of its consumers need attention: the metrics of the node itself name them";
        let texts = texts(&status(nodes));
        assert_eq!(texts.len(), 2);
        assert!(texts.contains(&(Warning, text.to_owned())), "{texts:?}");
    }

    #[test]
    fn a_node_of_an_earlier_version_than_the_policy_is_told() {
        let mut nodes = vec![node("a", vec![], vec![])];
        nodes[0].report.version = "0.1".to_owned();
        nodes[0].report.pool.is_policy_unknown = true;
        let text = "a: node of version 0.1 does not know the policy, and goes on by its own, none: update it";
        assert_eq!(texts(&status(nodes)), [(Warning, text.to_owned())]);
    }

    #[test]
    fn a_manager_of_an_earlier_version_than_the_policy_is_told() {
        let mut status = status(vec![]);
        status.policy = Some(Named::Unknown { policy: "fair".to_owned() });
        let told = |status: &ClusterStatus, way: &str| {
            let text = format!(
                "manager: manager of version 1 does not know the policy \"fair\", and {way}: update it, or set \
                 a policy"
            );
            assert_eq!(texts(status), [(Warning, text)]);
        };
        told(&status, "hears by what nodes went");
        status.policy_instead = Some(Named::Known(Choice::GreedyLocal {}));
        told(&status, "goes on by greedy-local");
        status.policy = status.policy_instead.take();
        assert_eq!(texts(&status), []);
    }

    #[test]
    fn a_pool_is_nearly_full_and_then_full() {
        let with_left = |pages: u64| {
            let mut one = donor("a", 3);
            one.stats.as_mut().expect("it has some").lendable_pages = pages;
            texts(&status(vec![node("a", vec![one], vec![])]))
        };
        let all = (4 << 30) / 4096;
        assert_eq!(with_left(all / 10 + 1), []);
        assert_eq!(with_left(all / 11)[0].0, Warning);
        assert_eq!(with_left(0)[0].0, Critical);
    }

    #[test]
    fn a_donor_that_is_away_says_why() {
        let mut one = donor("d", 1);
        one.state = DonorState::Starting;
        one.last_error = Some("killed by signal 9".to_owned());
        let all = texts(&status(vec![node("a", vec![one], vec![])]));
        assert_eq!(all, [(Critical, "d: donor does not serve: killed by signal 9".to_owned())]);
    }

    #[test]
    fn what_is_parked_is_told() {
        let with = |park: ParkSnapshot| {
            let mut one = donor("d", 1);
            one.stats.as_mut().expect("it has some").park = Some(park);
            texts(&status(vec![node("a", vec![one], vec![])]))
        };
        let parked = ParkSnapshot { parked_pages: 1 << 18, ..ParkSnapshot::default() };
        assert_eq!(with(ParkSnapshot::default()), []);
        assert_eq!(with(parked.clone()), [(Notice, "d: 1G is parked on its disk".to_owned())]);
        let full = ParkSnapshot { trouble: Some("No space left".to_owned()), ..parked.clone() };
        let text = "d: 1G is parked, no more can be: No space left";
        assert_eq!(with(full), [(Warning, text.to_owned())]);
        let bad = ParkSnapshot { pages_unreadable: 2, ..parked };
        assert_eq!(with(bad)[0], (Critical, "d: its disk did not give 2 parked pages".to_owned()));
    }

    #[test]
    fn what_is_lost_is_critical() {
        let mut one = program("sort", 1);
        let stats = one.stats.as_mut().expect("it has some");
        (stats.pool.lost_bytes, stats.pool.scrub.lost_pages) = (16 << 20, 2);
        let all = texts(&status(vec![node("a", vec![], vec![one])]));
        assert_eq!(all[0], (Critical, "sort: 16M of its memory is lost".to_owned()));
        assert_eq!(all[1], (Critical, "sort: 2 pages are damaged in every copy".to_owned()));
    }
}
