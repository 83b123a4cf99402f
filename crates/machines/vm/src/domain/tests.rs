use super::*;
use proptest::prelude::*;

/// As libvirt 9 writes a domain that was defined with little more than its memory.
const DUMPED: &str = include_str!("domains/dumped.xml");
const INSTALLED: &str = include_str!("domains/installed.xml");
const WITH_COMMAND_LINE: &str = include_str!("domains/with_command_line.xml");
const ONE_LINE: &str = include_str!("domains/one_line.xml");
const ALL: [&str; 4] = [DUMPED, INSTALLED, WITH_COMMAND_LINE, ONE_LINE];

fn changed(xml: &str) -> Result<String, DomainError> {
    with_variables(xml, &[("HECATON_VM", "db".to_owned())])
}

fn with_variables(xml: &str, variables: &[(&str, String)]) -> Result<String, DomainError> {
    let wish = Wish {
        library: Path::new("/usr/lib/hecaton/libhecaton.so"),
        monitor: Path::new("/run/hecaton/vm-db.qmp"),
        variables,
    };
    edit(xml, wish)
}

/// The value of an element's attribute, by the element's path from the root.
fn value(xml: &str, path: &[&str], attribute: &str) -> Option<String> {
    let document = Document::parse(xml).expect("well formed");
    let node = path.iter().try_fold(document.root_element(), |node, name| child(node, name))?;
    node.attribute(attribute).map(str::to_owned)
}

fn variables(xml: &str) -> Vec<(String, String)> {
    let document = Document::parse(xml).expect("well formed");
    let commandline = qemu_commandline(document.root_element()).expect("a command line");
    let set = commandline.children().filter(|node| node.has_tag_name((QEMU_NAMESPACE, "env")));
    let text = |node: Node<'_, '_>, name| node.attribute(name).unwrap_or_default().to_owned();
    set.map(|node| (text(node, "name"), text(node, "value"))).collect()
}

#[test]
fn memory_is_shared_and_the_library_is_loaded() {
    for xml in ALL {
        let after = changed(xml).expect("changed");
        assert!(restore(&after).is_ok());
        assert_eq!(restore(xml), Err(DomainError::NotOurs));
        assert_eq!(value(&after, &["memoryBacking", "source"], "type").unwrap(), "memfd");
        assert_eq!(value(&after, &["memoryBacking", "access"], "mode").unwrap(), "shared");
        let set = variables(&after);
        assert!(set.contains(&("HECATON_VM".into(), "db".into())), "{set:?}");
        let preload = set.iter().find(|(name, _)| name == PRELOAD).expect("preloaded");
        assert!(preload.1.starts_with("/usr/lib/hecaton/libhecaton.so"), "{preload:?}");
        assert_eq!(set.iter().filter(|(name, _)| name == PRELOAD).count(), 1);
        assert!(after.contains("value=\"unix:/run/hecaton/vm-db.qmp,server=on,wait=off\""));
    }
}

#[test]
fn it_is_changed_back_byte_for_byte() {
    for xml in [DUMPED, INSTALLED, WITH_COMMAND_LINE] {
        assert_eq!(restore(&changed(xml).unwrap()).unwrap(), xml);
    }
    // An empty element comes back with an end tag.
    let back = restore(&changed(ONE_LINE).unwrap()).unwrap();
    assert_eq!(back, ONE_LINE.replace("<metadata/>", "<metadata></metadata>"));
    assert_eq!(restore(DUMPED), Err(DomainError::NotOurs));
}

#[test]
fn the_difference_is_ours_and_nothing_else() {
    let after = changed(DUMPED).unwrap();
    let diff = diff("db", DUMPED, &after);
    let removed = diff.lines().filter(|line| line.starts_with('-') && !line.starts_with("---"));
    // The start tag, which has a namespace more.
    assert_eq!(removed.collect::<Vec<_>>(), ["-<domain type='qemu'>"], "{diff}");
    let added = diff.lines().filter(|line| line.starts_with('+') && !line.starts_with("+++"));
    assert_eq!(added.count(), 14, "{diff}");
    let kept = changed(WITH_COMMAND_LINE).unwrap();
    assert!(kept.contains("libhecaton.so:/opt/other.so"), "{kept}");
    assert!(kept.contains("<q:env name=\"HECATON_VM\""), "its own prefix is used: {kept}");
}

#[test]
fn a_second_change_replaces_the_first() {
    for xml in ALL {
        let first = with_variables(xml, &[("HECATON_LOCAL", "1".into())]).unwrap();
        let second = with_variables(&first, &[("HECATON_LOCAL", "2".into())]).unwrap();
        let locals: Vec<_> =
            variables(&second).into_iter().filter(|(name, _)| name == "HECATON_LOCAL").collect();
        assert_eq!(locals, [("HECATON_LOCAL".to_owned(), "2".to_owned())]);
        assert_eq!(
            second,
            with_variables(&restore(&first).unwrap(), &[("HECATON_LOCAL", "2".into())]).unwrap()
        );
    }
}

#[test]
fn what_others_have_added_since_stays() {
    let after = changed(DUMPED).unwrap();
    let after = after
        .replace("</qemu:commandline>", "  <qemu:arg value='-snapshot'/>\n  </qemu:commandline>")
        .replace("</memoryBacking>", "<nosharepages/></memoryBacking>")
        .replace("</metadata>", "<a:b xmlns:a='urn:a'/></metadata>");
    let back = restore(&after).unwrap();
    for kept in ["-snapshot", "<nosharepages/>", "urn:a", QEMU_NAMESPACE] {
        assert!(back.contains(kept), "{kept} in {back}");
    }
    for gone in ["HECATON", "libhecaton", "memfd", "hecaton.vm", ".qmp", "urn:hecaton"] {
        assert!(!back.contains(gone), "{gone} in {back}");
    }
}

#[test]
fn what_cannot_be_paged_is_named() {
    let refused = |from: &str, to: &str| match changed(&INSTALLED.replacen(from, to, 1)) {
        Err(DomainError::Refused(refused)) => refused,
        other => panic!("{to}: {other:?}"),
    };
    for (from, to, reason) in [
        ("<nosharepages/>", "<hugepages/>", Reason::HugePages),
        ("<nosharepages/>", "<locked/>", Reason::Locked),
        ("<nosharepages/>", "<allocation mode='immediate'/>", Reason::Preallocated),
        ("discard=\"unmap\"", "cache='none'", Reason::DirectIo),
        ("discard=\"unmap\"", "cache='writeback' io='native'", Reason::DirectIo),
        ("device=\"disk\"", "device='lun'", Reason::DirectIo),
        ("<disk type=\"file\"", "<disk type='nvme'", Reason::PinnedByDevice),
        ("type=\"network\"", "type='vhostuser'", Reason::MappedElsewhere),
        ("type=\"network\"", "type='hostdev'", Reason::PinnedByDevice),
        (
            "<memballoon",
            "<hostdev mode='subsystem' type='pci'/><memballoon",
            Reason::PinnedByDevice,
        ),
        (
            "<memballoon",
            "<hostdev mode='subsystem' type='mdev'/><memballoon",
            Reason::PinnedByDevice,
        ),
        ("<memballoon", "<shmem name='s'/><memballoon", Reason::MappedElsewhere),
        (
            "<memballoon",
            "<filesystem type='mount'><driver type='virtiofs'/></filesystem><memballoon",
            Reason::MappedElsewhere,
        ),
        ("<memballoon", "<memory model='nvdimm'/><memballoon", Reason::FileOnDisk),
        ("<devices>", "<launchSecurity type='sev'/><devices>", Reason::Encrypted),
    ] {
        let refused = refused(from, to);
        assert_eq!(
            refused.iter().map(|refusal| refusal.reason).collect::<Vec<_>>(),
            [reason],
            "{to}"
        );
    }
    let pinned = WITH_COMMAND_LINE.replace("virtio-rng-pci", "vfio-pci,host=01:00.0");
    let error = changed(&pinned).expect_err("refused").to_string();
    assert!(error.contains("-device vfio-pci,host=01:00.0: the device"), "{error}");
}

#[test]
fn an_apostrophe_between_single_quotes_stays_one() {
    let quoted = WITH_COMMAND_LINE.replace("/opt/other.so", "/opt/o&apos;ther.so");
    assert_ne!(quoted, WITH_COMMAND_LINE);
    let after = changed(&quoted).expect("changed");
    let set = variables(&after);
    let preload = set.iter().find(|(name, _)| name == PRELOAD).expect("preloaded");
    assert!(preload.1.ends_with(":/opt/o'ther.so"), "{preload:?}");
    assert_eq!(restore(&after).expect("changed back"), quoted);
}

#[test]
fn what_is_no_domain_of_qemu_is_refused() {
    assert!(matches!(changed("<domain type='lxc'/>"), Err(DomainError::NotQemu(_))));
    assert!(matches!(changed("<network/>"), Err(DomainError::Xml(_))));
    assert!(matches!(changed("<domain"), Err(DomainError::Xml(_))));
    assert!(matches!(changed("<domain type='kvm'/>"), Err(DomainError::Xml(_))));
    let long = " ".repeat(MAX_DOMAIN_BYTES + 1);
    assert!(matches!(changed(&long), Err(DomainError::Xml(_))));
}

proptest! {
    /// Damaged domains are refused or changed to something well formed, and never a panic.
    #[test]
    fn damage_is_survived(which in 0..4usize, at in 0..2000usize, length in 0..40usize) {
        let mut xml = ALL[which].to_owned();
        let start = at.min(xml.len());
        let end = (start + length).min(xml.len());
        if xml.is_char_boundary(start) && xml.is_char_boundary(end) {
            xml.replace_range(start..end, "");
        }
        if let Ok(after) = changed(&xml) {
            prop_assert!(Document::parse(&after).is_ok(), "{}", after);
            prop_assert!(restore(&after).is_ok());
        }
    }
}
