//! `hecaton volume attach`: which node has the volume, and whether it lets this one have it.

use crate::cluster::ClusterArgs;
use anyhow::bail;
use hecaton_node::message::AttachVolume;
use hecaton_node::volumes::VolumeReport;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

/// How long the manager may take to hear of a volume that was detached just now.
const PATIENCE: Duration = Duration::from_secs(3);

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(200);

pub(super) fn attach(volume: &str, cluster: &ClusterArgs) -> anyhow::Result<()> {
    let mut local = cluster.need_local_node()?;
    let here = local.status()?;
    let wish = |from| AttachVolume { volume: volume.to_owned(), from };
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
        match holder(volume, &here.name, known) {
            Ok((node, address)) => {
                let from = Some((node.to_owned(), address));
                return Ok(local.attach_volume(wish(from))?);
            }
            Err(reason) if began.elapsed() >= PATIENCE => bail!("{reason}"),
            Err(_) => thread::sleep(INTERVAL),
        }
    }
}

/// Who lets this node have the volume, and where; or who has it.
fn holder<'a>(
    volume: &str,
    here: &str,
    known: impl Iterator<Item = (&'a str, &'a VolumeReport)>,
) -> Result<(&'a str, SocketAddr), String> {
    let mut reason = format!("no node of the cluster has a volume `{volume}`");
    for (node, report) in known.filter(|(_, report)| report.name == volume) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_block::hand_over::Offer;

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
}
