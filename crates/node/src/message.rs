//! What is said over `node.sock`: one line of JSON each way.
//!
//! Every request is answered by one [`Answer`], in order. The connection on which a launcher
//! (`hecaton run`) started a pager is that pager's launch line: [`Answer::PagerEnded`] comes on it
//! by itself when the pager has ended, and when the launcher closes it, or says
//! [`Request::LaunchOver`], the pager is told that no further program will be started.
//!
//! ```text
//! {"start_pager":{"name":"sort-417","local_bytes":268435456}}
//!     {"pager":{"name":"sort-417","socket":"/run/user/1000/hecaton/pager-1.sock","pid":420}}
//! {"pager_stats":{"consumer":"sort-417","faults":812,...}}        "done"
//! "donors"                                     {"donors":[{"name":"donor-1",...}]}
//! "status"                                     {"status":{"name":"a",...}}
//! ```

use crate::report::{DonorAddress, NodeReport};
use hecaton_pager::Stats;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What may be asked of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// The node and all it runs. Answered with [`Answer::Status`].
    Status,
    /// The donors of the cluster, as far as the node knows. Answered with [`Answer::Donors`].
    Donors,
    /// Start a pager. Answered with [`Answer::Pager`] once it listens.
    StartPager(StartPager),
    /// The launcher's program has ended: the pager ends too, once nothing that the program left
    /// behind uses it. Only on the connection that started the pager.
    LaunchOver,
    /// From a pager: its statistics at this moment.
    PagerStats(Box<PagerStats>),
}

/// A wish for a pager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartPager {
    /// The consumer's name; no other consumer of the node may have it.
    pub name: String,
    /// Most bytes of the consumer's memory that stay on this host.
    pub local_bytes: u64,
    /// Seconds that a donor may be away before the consumer is ended; a minute if nothing is said.
    #[serde(default)]
    pub donor_patience_s: Option<u64>,
}

/// A pager's statistics.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PagerStats {
    /// Whose pager it is.
    pub consumer: String,
    /// What it counted.
    #[serde(flatten)]
    pub stats: Stats,
}

/// What a node answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Done, and nothing to tell.
    Done,
    /// The node and all it runs.
    Status(Box<NodeReport>),
    /// The donors of the cluster.
    Donors(Vec<DonorAddress>),
    /// The pager listens.
    Pager(PagerAddress),
    /// The pager has ended.
    PagerEnded(Box<PagerEnd>),
    /// Not done, and why.
    Refused(String),
}

/// Where a pager listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerAddress {
    /// The consumer's name.
    pub name: String,
    /// The socket that `libhecaton.so` connects to.
    pub socket: PathBuf,
    /// The pager's process, leader of its process group.
    pub pid: u32,
}

/// How a pager ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PagerEnd {
    /// The consumer's name.
    pub name: String,
    /// What went wrong; `None` if all was released in peace.
    pub error: Option<String>,
    /// The last statistics that it sent, if it ever did.
    pub stats: Option<Stats>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_lines_are_as_documented() {
        let line = |request: &Request| serde_json::to_value(request).expect("serialised");
        assert_eq!(line(&Request::Status), json!("status"));
        let wish =
            StartPager { name: "sort-417".into(), local_bytes: 1, donor_patience_s: Some(60) };
        assert_eq!(
            line(&Request::StartPager(wish)),
            json!({"start_pager": {"name": "sort-417", "local_bytes": 1, "donor_patience_s": 60}})
        );
        let stats = PagerStats { consumer: "a".into(), stats: Stats::default() };
        assert_eq!(line(&Request::PagerStats(Box::new(stats)))["pager_stats"]["faults"], 0);
    }
}
