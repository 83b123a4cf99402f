//! `hecaton volume attach`: which node has the volume, and whether it lets this one have it.

use crate::cluster::ClusterArgs;
use anyhow::bail;
use hecaton_node::socket::message::AttachVolume;
use hecaton_node::volumes::{ExportAddress, VolumeReport};
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

/// How long the manager may take to hear of a volume that was detached just now.
const PATIENCE: Duration = Duration::from_secs(3);

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(200);

pub(super) fn attach(volume: &str, read_only: bool, cluster: &ClusterArgs) -> anyhow::Result<()> {
    let mut local = cluster.need_local_node()?;
    let here = local.status()?;
    let wish = |from| AttachVolume { volume: volume.to_owned(), from, read_only };
    if here.volumes.iter().any(|known| known.name == volume) {
        return Ok(local.attach_volume(wish(None))?);
    }
    let manager = cluster.need_manager()?;
    let began = Instant::now();
    loop {
        let status = manager.status()?;
        let reports = status.nodes.iter().map(|node| &node.report);
        let known = reports
            .flat_map(|report| report.volumes.iter().map(|volume| (report.name.as_str(), volume)));
        let found = match read_only {
            true => sharer(volume, known),
            false => holder(volume, &here.name, known),
        };
        match found {
            Ok((node, address)) => {
                let from = Some((node.to_owned(), address));
                return Ok(local.attach_volume(wish(from))?);
            }
            Err(reason) if began.elapsed() >= PATIENCE => bail!("{reason}"),
            Err(_) => thread::sleep(INTERVAL),
        }
    }
}

/// Returns the node that has detached the volume for this one, and its address. Otherwise says
/// which node holds the volume.
fn holder<'a>(
    volume: &str,
    here: &str,
    known: impl Iterator<Item = (&'a str, &'a VolumeReport)>,
) -> Result<(&'a str, SocketAddr), String> {
    let mut reason = format!("no node of the cluster has a volume `{volume}`");
    for (node, report) in known.filter(|(_, report)| has(report, volume)) {
        let (to, verb) = match &report.detached {
            Some(offer) if offer.to == here => return Ok((node, offer.address)),
            Some(offer) => (offer.to.as_str(), "has detached it for"),
            None => (here, "has it attached as its writer; there it can be detached for"),
        };
        reason = format!(
            "the volume `{volume}` is held by node `{node}`, which {verb} node `{to}` \
             (`hecaton volume detach {volume} --to {here}` on `{node}`)"
        );
    }
    Err(reason)
}

/// Returns the node that shares the volume, and its address. Otherwise says which node holds the
/// volume.
fn sharer<'a>(
    volume: &str,
    known: impl Iterator<Item = (&'a str, &'a VolumeReport)>,
) -> Result<(&'a str, SocketAddr), String> {
    let mut reason = format!("no node of the cluster has a volume `{volume}`");
    for (node, report) in known.filter(|(_, report)| has(report, volume)) {
        let shared = report.exports.iter().find_map(|export| match export.address {
            ExportAddress::Nodes(address) => address,
            _ => None,
        });
        match shared {
            Some(address) => return Ok((node, address)),
            None => {
                reason = format!(
                    "the volume `{volume}` is held by node `{node}`, which does not share it (`hecaton volume share \
                     {volume}` on `{node}`)"
                );
            }
        }
    }
    Err(reason)
}

/// Whether it is that one, and not one that is read there.
fn has(report: &VolumeReport, volume: &str) -> bool {
    report.name == volume && report.reads_from.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_block::hand_over::Offer;
    use hecaton_block::readers::SharedBy;
    use hecaton_node::volumes::Exported;

    #[test]
    fn who_has_it_is_named() {
        let address = SocketAddr::from(([192, 0, 2, 1], 7));
        let volume = |name: &str, to: Option<&str>| VolumeReport {
            name: name.into(),
            detached: to.map(|to| Offer { to: to.into(), address }),
            ..VolumeReport::default()
        };
        let holder = |known: &[(&'static str, VolumeReport)]| {
            let found = holder("v", "b", known.iter().map(|(node, volume)| (*node, volume)));
            found.map(|(node, at)| (node.to_owned(), at))
        };
        let others = ("x", volume("w", Some("b")));
        assert!(holder(&[]).unwrap_err().contains("no node of the cluster has a volume `v`"));
        assert!(holder(std::slice::from_ref(&others)).is_err());
        let attached = holder(&[others.clone(), ("a", volume("v", None))]).unwrap_err();
        assert!(attached.contains("held by node `a`, which has it attached"), "{attached}");
        assert!(attached.contains("`hecaton volume detach v --to b` on `a`"), "{attached}");
        let for_another = holder(&[("a", volume("v", Some("c")))]).unwrap_err();
        assert!(
            for_another.contains("node `a`, which has detached it for node `c`"),
            "{for_another}"
        );
        let two = [("c", volume("v", None)), ("a", volume("v", Some("b")))];
        assert_eq!(holder(&two), Ok(("a".to_owned(), address)), "names are each node's own");
    }

    #[test]
    fn who_shares_it_is_named() {
        let address = SocketAddr::from(([192, 0, 2, 1], 7));
        let volume = |exports: &[&str], reads: bool| VolumeReport {
            name: "v".into(),
            exports: exports
                .iter()
                .map(|at| Exported {
                    address: at.parse().unwrap(),
                    read_only: true,
                    tls: None,
                    uring: false,
                })
                .collect(),
            reads_from: reads.then(|| SharedBy { node: "a".into(), address }),
            ..VolumeReport::default()
        };
        let shared = volume(&["unix:/a", "nodes:192.0.2.1:7"], false);
        let read = volume(&["unix:/b"], true);
        let known = [("b", &read), ("a", &shared)];
        assert_eq!(sharer("v", known.into_iter()), Ok(("a", address)));
        let alone = volume(&["unix:/a"], false);
        let refused = sharer("v", [("a", &alone), ("b", &read)].into_iter()).unwrap_err();
        assert!(refused.contains("held by node `a`, which does not share it"), "{refused}");
        let detach = holder("v", "b", [("a", &shared), ("b", &read)].into_iter()).unwrap_err();
        assert!(detach.contains("held by node `a`"), "{detach}");
    }
}
