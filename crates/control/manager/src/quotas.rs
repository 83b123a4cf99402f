//! Divides the pool among nodes each second, by the cluster's policy.
//!
//! The input comes from heartbeats. The round itself is [`hecaton_policy::cluster::quotas`].
//!
//! The policy is written down; quotas are not, since nodes report theirs. A policy that a manager
//! of a later version has written stays as it is. This manager then goes by the last policy that it
//! knows, as the first node with one reports it. Without such a report it goes by greedy-remote: no
//! consumer has a target, and quotas still pass to nodes in want.

use crate::registry::SILENT_AFTER;
use hecaton_node::cluster::report::NodeReport;
use hecaton_policy::cluster::NodeId;
use hecaton_policy::cluster::choice::{Choice, Named};
use hecaton_policy::cluster::quotas::{Holder, divide};
use hecaton_policy::cluster::targets::GREEDY_REQUEST_PAGES;
use std::collections::BTreeMap;
use std::time::Duration;

/// Time between two rounds.
const ROUND: Duration = Duration::from_secs(1);

/// Most pages that a node is believed to use, or to want, or to have: 4 PiB. Sums stay within their
/// bounds.
const MAX_PAGES: u64 = 1 << 40;

/// In place of a policy that is not known, where no node says what it was before.
const GREEDY: Choice = Choice::GreedyRemote { request_pages: GREEDY_REQUEST_PAGES };

#[derive(Debug, Default)]
pub(crate) struct Quotas {
    policy: Option<Named>,
    /// Policy in use: the chosen one, or the one in place of an unknown one, once that is clear.
    choice: Option<Choice>,
    /// Quotas of the nodes that took part in the last round.
    pages: BTreeMap<String, u64>,
    /// Requests since then.
    requests: BTreeMap<String, u64>,
    last_round: Option<Duration>,
}

impl Quotas {
    pub(crate) fn new(policy: Option<Named>) -> Quotas {
        let choice = policy.as_ref().and_then(Named::known);
        Quotas { policy, choice, ..Quotas::default() }
    }

    pub(crate) fn policy(&self) -> Option<&Named> {
        self.policy.as_ref()
    }

    /// Policy in use in place of one that this version does not know.
    pub(crate) fn instead(&self) -> Option<Choice> {
        self.choice.filter(|_| self.is_unknown())
    }

    /// Policy that nodes hear: the one in use, or the name of an unknown one, under which nodes
    /// keep what they have.
    pub(crate) fn told(&self) -> Option<Named> {
        self.choice.map(Named::Known).or_else(|| self.policy.clone())
    }

    fn is_unknown(&self) -> bool {
        matches!(self.policy, Some(Named::Unknown { .. }))
    }

    pub(crate) fn choose(&mut self, choice: Option<Choice>) {
        // Quotas stay: the next policy goes on from there.
        (self.policy, self.choice) = (choice.map(Named::Known), choice);
        if choice.is_none() {
            self.pages.clear();
            self.requests.clear();
        }
    }

    /// Pages that the node's consumers may use together; `None` before its first round.
    pub(crate) fn of(&self, node: &str) -> Option<u64> {
        self.pages.get(node).copied()
    }

    pub(crate) fn forget(&mut self, node: &str) {
        self.pages.remove(node);
        self.requests.remove(node);
    }

    /// Takes a node's request for pages. A request under another policy does not count.
    pub(crate) fn hear(&mut self, report: &NodeReport) {
        if self.is_unknown() {
            self.choice = self.choice.or(report.pool.policy);
        }
        if self.choice.is_some() && report.pool.policy == self.choice {
            self.requests.insert(report.name.clone(), report.pool.request_pages);
        }
    }

    /// Whether a round is due. A manager that has started anew hears all nodes first.
    pub(crate) fn is_due(&self, now: Duration) -> bool {
        let since = |last| now.saturating_sub(last) >= ROUND;
        self.policy.is_some() && now >= SILENT_AFTER && self.last_round.is_none_or(since)
    }

    /// A round among the nodes that are up, which is due.
    pub(crate) fn divide<'a>(&mut self, now: Duration, up: impl Iterator<Item = &'a NodeReport>) {
        let choice = *self.choice.get_or_insert(GREEDY);
        self.last_round = Some(now);
        let up: Vec<&NodeReport> = up.collect();
        let holders: Vec<Holder> =
            up.iter().zip(0..).map(|(report, id)| self.holder(NodeId(id), report)).collect();
        let pages = divide(&choice.policy(), &holders);
        self.pages = up.iter().map(|report| report.name.clone()).zip(pages).collect();
        // Each request is answered once; who is still in want asks again.
        self.requests.clear();
    }

    fn holder(&self, node: NodeId, report: &NodeReport) -> Holder {
        let share = &report.pool;
        let believed = |pages: u64| pages.min(MAX_PAGES);
        Holder {
            node,
            home_pages: NodeReport::home_pages(&report.donors),
            quota_pages: self.of(&report.name).or(share.quota_pages).map(believed),
            used_pages: believed(share.used_pages),
            wanted_pages: believed(share.wanted_pages),
            request_pages: believed(self.requests.get(&report.name).copied().unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::lasting::Lasting;
    use crate::registry::Registry;
    use hecaton_donor::Snapshot;
    use hecaton_node::cluster::report::{HeartbeatAnswer, PoolShare};
    use hecaton_node::donors::DonorReport;
    use serde_json::json;

    const TLP: Choice = Choice::Tlp { percent: 2, threshold_pages: 0, reserve_pages: 0 };

    /// A node that lends a thousand pages.
    fn report(name: &str, pool: PoolShare) -> NodeReport {
        let stats = Snapshot { limit_pages: 1000, ..Snapshot::default() };
        let donor = DonorReport { stats: Some(stats), ..DonorReport::default() };
        let donor = DonorReport { name: format!("{name}-1"), ..donor };
        NodeReport {
            name: name.to_owned(),
            boot: 1,
            pool,
            donors: vec![donor],
            ..NodeReport::default()
        }
    }

    fn second(registry: &mut Registry, at: u64, name: &str, pool: PoolShare) -> HeartbeatAnswer {
        let now = Duration::from_secs(at);
        registry.heartbeat(now, name, report(name, pool)).expect("taken")
    }

    fn named(answer: &HeartbeatAnswer) -> Option<Choice> {
        answer.policy.as_ref().and_then(Named::known)
    }

    fn asks(request_pages: u64, quota_pages: Option<u64>) -> PoolShare {
        PoolShare { policy: Some(TLP), quota_pages, request_pages, ..PoolShare::default() }
    }

    #[test]
    fn a_policy_that_cannot_be_is_not_read() {
        for (text, part) in [
            (r#"{"policy":"tlp","percent":101,"threshold_pages":0,"reserve_pages":0}"#, "101 %"),
            (r#"{"policy":"greedy-remote","request_pages":0}"#, "asks for nothing"),
            (r#"{"policy":"greedy-local","percent":1}"#, "unknown field"),
            (r#"{"policy":"fair"}"#, "unknown variant"),
        ] {
            let error = serde_json::from_str::<Choice>(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        let text = serde_json::to_string(&TLP).expect("written");
        assert_eq!(serde_json::from_str::<Choice>(&text).expect("read"), TLP);
    }

    #[test]
    fn a_node_that_divides_by_a_policy_of_a_later_version_is_heard() {
        let mut said = serde_json::to_value(report("a", asks(5, Some(1000)))).expect("written");
        said["pool"]["policy"] = json!({"policy": "fair", "spread": 3});
        let heard: NodeReport = serde_json::from_value(said).expect("read");
        assert_eq!((heard.pool.policy, heard.pool.quota_pages), (None, Some(1000)));
        let mut registry = Registry::default();
        let answer = registry.heartbeat(Duration::ZERO, "a", heard).expect("taken");
        assert_eq!(answer.policy, None, "nothing is learnt of it");
    }

    #[test]
    fn a_policy_is_set_while_nodes_run_and_lifted() {
        let mut registry = Registry::default();
        let nothing = PoolShare::default();
        let answer = second(&mut registry, 10, "a", nothing);
        assert_eq!((named(&answer), answer.quota_pages), (None, None));
        registry.choose(Some(TLP));
        assert_eq!(registry.changes().policy, Some(Some(TLP)));
        let answer = second(&mut registry, 11, "a", nothing);
        assert_eq!((named(&answer), answer.quota_pages), (Some(TLP), Some(1000)));
        assert_eq!(registry.status(Duration::from_secs(11)).policy, Some(Named::Known(TLP)));
        registry.choose(None);
        let answer = second(&mut registry, 12, "a", asks(5, Some(1000)));
        assert_eq!((named(&answer), answer.quota_pages), (None, None));
    }

    #[test]
    fn a_request_is_granted_once_and_a_silent_node_keeps_nobody_waiting() {
        let mut registry = Registry::default();
        registry.choose(Some(TLP));
        second(&mut registry, 10, "b", asks(0, None));
        assert_eq!(second(&mut registry, 10, "a", asks(0, None)).quota_pages, None);
        assert_eq!(second(&mut registry, 11, "a", asks(300, Some(1000))).quota_pages, Some(1300));
        assert_eq!(second(&mut registry, 11, "b", asks(0, Some(1000))).quota_pages, Some(700));
        // The round has had the request; nothing is asked since.
        assert_eq!(second(&mut registry, 12, "b", asks(0, Some(700))).quota_pages, Some(700));
        // The other one is silent now, and what it lends is nobody's to use.
        assert_eq!(second(&mut registry, 30, "b", asks(0, Some(700))).quota_pages, Some(1000));
    }

    #[test]
    fn the_next_manager_keeps_the_policy_and_hears_the_quotas() {
        let (mut lasting, mut registry) = (Lasting::default(), Registry::default());
        registry.choose(Some(TLP));
        lasting.apply(registry.changes());
        assert_eq!(lasting.policy, Some(Named::Known(TLP)));
        let mut next = Registry::new(lasting);
        // Till it has heard everybody it says what there is to divide by, and not how much.
        let answer = second(&mut next, 0, "a", asks(0, Some(1300)));
        assert_eq!((named(&answer), answer.quota_pages), (Some(TLP), None));
        second(&mut next, 4, "b", asks(0, Some(700)));
        assert_eq!(second(&mut next, 5, "a", asks(0, Some(1300))).quota_pages, Some(1300));
        assert_eq!(second(&mut next, 5, "b", asks(0, Some(700))).quota_pages, Some(700));
    }

    fn of_a_later_version() -> Lasting {
        let policy = Named::Unknown { policy: "fair".to_owned() };
        Lasting { epoch: 3, policy: Some(policy), ..Lasting::default() }
    }

    #[test]
    fn in_place_of_a_policy_of_a_later_version_is_the_last_one_that_a_node_knows() {
        let mut registry = Registry::new(of_a_later_version());
        let fair = of_a_later_version().policy;
        registry.written();
        // A node of the later version divides by the policy, and is not to be led away from it
        // while others are heard.
        let answer = second(&mut registry, 0, "new", PoolShare::default());
        assert_eq!((answer.policy.as_ref(), answer.quota_pages), (fair.as_ref(), None));
        assert_eq!(registry.policy_instead(), None);
        let answer = second(&mut registry, 1, "old", asks(0, Some(1300)));
        assert_eq!((named(&answer), answer.quota_pages), (Some(TLP), None));
        assert_eq!(registry.policy_instead(), Some(TLP));
        second(&mut registry, 5, "new", asks(0, Some(700)));
        assert_eq!(second(&mut registry, 5, "old", asks(0, Some(1300))).quota_pages, Some(1300));
        let status = registry.status(Duration::from_secs(5));
        assert_eq!(
            (&status.policy, status.policy_instead.clone()),
            (&fair, Some(Named::Known(TLP)))
        );
        let words = status.policy_in_words().expect("there is one");
        assert!(words.starts_with("\"fair\", which the manager of version "), "{words}");
        assert!(
            words.ends_with("does not know: tlp --p 2 --threshold 0 --reserve 0 in its place"),
            "{words}"
        );
        assert_eq!(registry.changes().policy, None, "what was chosen stays as it is");
    }

    #[test]
    fn in_place_of_a_policy_of_a_later_version_is_greedy_if_no_node_has_one() {
        let mut registry = Registry::new(of_a_later_version());
        let answer = second(&mut registry, 4, "a", PoolShare::default());
        assert_eq!(answer.policy, of_a_later_version().policy);
        let answer = second(&mut registry, 5, "a", PoolShare::default());
        assert_eq!((named(&answer), answer.quota_pages), (Some(GREEDY), Some(1000)));
        second(&mut registry, 6, "a", asks(0, Some(1000)));
        assert_eq!((registry.policy_instead(), registry.changes().policy), (Some(GREEDY), None));
        // Set by somebody, it is no stand-in any more.
        registry.choose(Some(GREEDY));
        assert_eq!(registry.changes().policy, Some(Some(GREEDY)));
        assert_eq!(
            (registry.policy(), registry.policy_instead()),
            (Some(&Named::Known(GREEDY)), None)
        );
        // So with one that is lifted before anything has taken its place.
        let mut registry = Registry::new(of_a_later_version());
        registry.choose(None);
        assert_eq!((registry.changes().policy, registry.policy()), (Some(None), None));
    }

    #[test]
    fn a_manager_that_knows_nothing_learns_the_policy_from_the_nodes() {
        let mut registry = Registry::default();
        let answer = second(&mut registry, 0, "a", asks(0, Some(1000)));
        assert_eq!(named(&answer), Some(TLP));
        // Once lifted, it is not learnt again from one that has not heard it.
        registry.choose(None);
        assert_eq!(second(&mut registry, 1, "b", asks(0, Some(1000))).policy, None);
        // Nor by one that has a registry, in which there is none.
        let mut old = Registry::new(Lasting { epoch: 3, ..Lasting::default() });
        assert_eq!(second(&mut old, 0, "a", asks(0, Some(1000))).policy, None);
    }
}
