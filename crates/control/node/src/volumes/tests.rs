//! Volumes whose processes are shell scripts.

use super::*;
use crate::children::child::adopt_orphans;
use crate::socket::message::{AttachVolume, DetachVolume, Unexport};
use hecaton_pager::Site;
use hecaton_testkit::{wait_until, wait_until_seen};
use rustix::process::{Pid, kill_process};

/// Ends when it is told to; refuses to be deleted as long as the file is there.
const GOOD: &str = r#"
    read start
    echo '"serving"' >&0
    while read order; do
        case $order in
            *delete*) if [ -e "$0" ]; then echo '{"in_use":3}' >&0; else echo '"released"' >&0; exit 0; fi ;;
            *unexport*true*) echo '"unexported"' >&0 ;;
            *unexport*) echo '{"not_unexported":"process 7 (qemu) is attached to it"}' >&0 ;;
            *resize*8192*) echo '"resized"' >&0 ;;
            *resize*4096*) echo '{"not_resized":"it is full"}' >&0 ;;
            *resize*) exit 1 ;;
            *end*) echo '"released"' >&0; exit 0 ;;
        esac
    done"#;

fn volumes(script: &str, busy: &str) -> Volumes {
    adopt_orphans().expect("adopted");
    let command = ChildCommand {
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into(), busy.into()],
    };
    let donors = Arc::new(DonorDirectory::new(Site::unplaced("a"), Vec::new()));
    Volumes::new(command, donors, 1, NodePaths::new("/nowhere"), None, Arc::default())
}

fn wish(name: &str) -> CreateVolume {
    CreateVolume { name: name.to_owned(), size_bytes: 1 << 20, ..CreateVolume::default() }
}

/// The statistics of a volume with this space, which has so much in the pool.
pub(crate) fn counted(space: u64, data_bytes: u64) -> serde_json::Value {
    serde_json::json!({
        "size_bytes": 1 << 30, "data_bytes": data_bytes, "unkept_bytes": 0, "clients": 0, "reads": 0,
        "read_bytes": 0, "writes": 0, "written_bytes": 0, "dropped_bytes": 0, "errors": 0,
        "unsettled": 0,
        "pool": {
            "id": space, "epoch": 1, "pages": 0, "segment_pages": 4096, "segments": 0, "copies": 1,
            "segments_held": 0, "segments_degraded": 0, "segments_untended": 0, "segments_lost": 0,
            "code": null, "segments_coded": 0, "bytes_saved": 0, "bytes_filled": 0, "fenced": false,
            "donors": [],
            "scrub": {
                "bytes_verified": 0, "pages_repaired": 0, "pages_lost": 0, "copies_given_up": 0,
                "rounds": 0,
            },
        },
    })
}

fn wait_until_reported(
    volumes: &Volumes,
    what: &str,
    is_so: impl Fn(&VolumeReport) -> bool,
) -> VolumeReport {
    wait_until_seen(what, || {
        let report = volumes.reports().remove(0);
        if is_so(&report) { Ok(report) } else { Err(format!("{report:?}")) }
    })
}

/// The script reports when it must resize. It writes each target to a file, and reports again.
#[test]
fn those_with_a_spill_file_are_told_their_targets_as_they_report() {
    let dir = tempfile::tempdir().unwrap();
    let told = dir.path().join("told");
    let stats = serde_json::json!({"stats": counted(1, 4096)});
    let script = format!(
        r#"
        read start
        echo '"serving"' >&0
        while read order; do
            case $order in
                *resize*) echo '{stats}' >&0; echo '"resized"' >&0 ;;
                *target*) echo "$order" >> "$0"; echo '{stats}' >&0 ;;
                *end*) echo '"released"' >&0; exit 0 ;;
            esac
        done"#
    );
    let volumes = volumes(&script, told.to_str().unwrap());
    volumes.create(CreateVolume { spill: Some("/spill".into()), ..wish("a") }).unwrap();
    let word = |take_back_bytes| Some(Word { target_bytes: Some(8192), take_back_bytes });
    let lines = || std::fs::read_to_string(&told).unwrap_or_default();
    let reports = || {
        volumes.resize(&ResizeVolume { volume: "a".into(), size_bytes: 4096 }).unwrap();
    };
    let wait_for = |count: usize| {
        wait_until_seen(&format!("{count} targets are told"), || {
            let lines = lines();
            if lines.lines().count() >= count { Ok(()) } else { Err(lines) }
        });
    };
    volumes.set_words(|volume| word(0).filter(|_| volume == "a"));
    reports();
    wait_for(1);
    // A known target is not sent again, unless it asks for bytes to be taken back.
    volumes.set_words(|_| word(0));
    reports();
    volumes.set_words(|_| word(4096));
    reports();
    wait_for(2);
    volumes.set_words(|_| word(4096));
    reports();
    wait_for(3);
    let told: Vec<serde_json::Value> =
        lines().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let order = |bytes| serde_json::json!({"target": {"bytes": 8192, "take_back_bytes": bytes}});
    assert_eq!(told, [0, 4096, 4096].map(order));
    volumes.stop();
}

/// It writes into a file what it is told of itself, and of the copy that is wanted of it.
#[test]
fn one_that_is_encrypted_is_served_and_copied_so() {
    let dir = tempfile::tempdir().unwrap();
    let told = dir.path().join("told");
    let script = r#"
        read start
        echo "$start" >> "$0"
        echo '"serving"' >&0
        while read order; do
            case $order in
                *snapshot*) echo "$order" >> "$0"; echo '{"no_snapshot":"no room"}' >&0 ;;
                *end*) echo '"released"' >&0; exit 0 ;;
            esac
        done"#;
    for encrypt in [false, true] {
        let volumes = volumes(script, told.to_str().unwrap());
        volumes.create(CreateVolume { encrypt, ..wish("a") }).unwrap();
        assert_eq!(volumes.reports().remove(0).encrypted, encrypt);
        let wanted = SnapshotVolume { volume: "a".to_owned(), name: "b".to_owned() };
        assert!(volumes.snapshot(&wanted).is_err());
        let lines = std::fs::read_to_string(&told).unwrap();
        std::fs::remove_file(&told).unwrap();
        let told: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(told.len(), 2, "{lines}");
        assert_eq!([&told[0]["config"]["encrypt"], &told[1]["snapshot"]["encrypt"]], [encrypt; 2]);
        volumes.stop();
    }
}

#[test]
fn one_is_created_exported_and_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let busy = dir.path().join("busy");
    let volumes = volumes(GOOD, busy.to_str().unwrap());
    volumes.create(wish("a")).unwrap();
    assert!(matches!(volumes.create(wish("a")), Err(VolumesError::NameTaken(_))));
    let address = ExportAddress::Unix(dir.path().join("a.sock"));
    let export = || Export {
        volume: "a".into(),
        address: address.clone(),
        read_only: false,
        tls: None,
        insecure: false,
        uring: false,
    };
    assert_eq!(volumes.export(export()).unwrap(), address);
    assert!(matches!(volumes.export(export()), Err(VolumesError::Export(_))));
    let file = ExportAddress::Fuse(dir.path().join("a"));
    let refused = Export { address: file, read_only: true, ..export() };
    let refused = volumes.export(refused).unwrap_err().to_string();
    assert!(refused.contains("a.sock") && refused.contains("--read-only"), "{refused}");
    let unknown = Export { volume: "b".into(), ..export() };
    assert!(matches!(volumes.export(unknown), Err(VolumesError::Unknown(_))));
    std::fs::write(&busy, "").unwrap();
    assert!(matches!(volumes.delete("a"), Err(VolumesError::InUse { clients: 3, .. })));
    std::fs::remove_file(&busy).unwrap();
    volumes.delete("a").unwrap();
    assert!(volumes.reports().is_empty());
    let ExportAddress::Unix(path) = &address else { unreachable!() };
    assert!(!path.exists());
}

/// Nothing is mounted here: a mount needs root. The tested check comes before the mount.
#[test]
fn a_file_is_beside_others_where_all_of_them_read() {
    let dir = tempfile::tempdir().unwrap();
    // A file that cannot be mounted there has passed what is tested.
    let taken = dir.path().join("taken");
    std::fs::write(&taken, "somebody's").unwrap();
    let may = |volumes: &Volumes, address: &ExportAddress, read_only| {
        let (volume, address) = ("a".to_owned(), address.clone());
        match volumes.export(Export {
            volume,
            address,
            read_only,
            tls: None,
            insecure: false,
            uring: false,
        }) {
            Ok(_) | Err(VolumesError::Export(_)) => true,
            Err(VolumesError::FileBeside { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    };
    let file = ExportAddress::Fuse(taken);
    for (read_only, multi_writer) in [(false, false), (true, false), (false, true)] {
        let volumes = volumes(GOOD, "");
        volumes.create(CreateVolume { multi_writer, ..wish("a") }).unwrap();
        let socket = ExportAddress::Unix(dir.path().join("a.sock"));
        assert!(may(&volumes, &socket, read_only));
        assert_eq!(may(&volumes, &file, true), read_only || multi_writer);
        assert_eq!(may(&volumes, &file, false), multi_writer);
        volumes.stop();
    }
}

#[test]
fn an_export_is_taken_back_or_says_who_is_attached() {
    let dir = tempfile::tempdir().unwrap();
    let volumes = volumes(GOOD, "");
    volumes.create(wish("a")).unwrap();
    let socket = |name: &str| ExportAddress::Unix(dir.path().join(name));
    let export = |name: &str| Export {
        volume: "a".into(),
        address: socket(name),
        read_only: false,
        tls: None,
        insecure: false,
        uring: false,
    };
    let unexport = |name: &str, force| {
        volumes.unexport(&Unexport { volume: "a".into(), address: socket(name), force })
    };
    let nowhere = unexport("x.sock", false).unwrap_err().to_string();
    assert!(nowhere.contains("x.sock") && nowhere.contains("nowhere"), "{nowhere}");
    for name in ["x.sock", "y.sock"] {
        volumes.export(export(name)).unwrap();
    }
    let other = unexport("z.sock", true).unwrap_err().to_string();
    assert!(other.contains("x.sock, unix:"), "{other}");
    let refused = unexport("x.sock", false).unwrap_err().to_string();
    assert!(refused.contains("process 7 (qemu)") && refused.contains("--force"), "{refused}");
    assert_eq!(volumes.reports()[0].exports.len(), 2);
    unexport("x.sock", true).unwrap();
    assert!(!dir.path().join("x.sock").exists() && dir.path().join("y.sock").exists());
    assert_eq!(volumes.reports()[0].exports.len(), 1);
    assert!(matches!(unexport("x.sock", true), Err(VolumesError::NotExported { .. })));
    // Its place is free.
    volumes.export(export("x.sock")).unwrap();
    volumes.stop();
}

/// The process that was asked ends, and its successor is told of all exports.
#[test]
fn an_export_stays_whose_process_ends_instead_of_closing_it() {
    let dir = tempfile::tempdir().unwrap();
    let volumes = volumes(&GOOD.replace(r#"echo '"unexported"' >&0"#, "exit 1"), "");
    volumes.create(wish("a")).unwrap();
    let address = ExportAddress::Unix(dir.path().join("a.sock"));
    let export = Export {
        volume: "a".into(),
        address: address.clone(),
        read_only: false,
        tls: None,
        insecure: false,
        uring: false,
    };
    volumes.export(export).unwrap();
    let wish = Unexport { volume: "a".into(), address, force: true };
    let ended = volumes.unexport(&wish).unwrap_err().to_string();
    assert!(ended.contains("its process ended"), "{ended}");
    let after = wait_until_reported(&volumes, "the next process serves", |report| {
        report.restarts == 1 && report.state == VolumeState::Serving
    });
    assert_eq!(after.exports.len(), 1);
    volumes.stop();
}

/// If the kernel has no ublk, the attempt leaves nothing. If it has, no process serves the device.
#[test]
fn a_block_device_is_refused_in_one_line_where_there_can_be_none() {
    let dir = tempfile::tempdir().unwrap();
    let volumes = volumes(GOOD, "");
    volumes.create(wish("a")).unwrap();
    let socket = ExportAddress::Unix(dir.path().join("a.sock"));
    let export = |address: &ExportAddress, read_only| {
        let address = address.clone();
        volumes.export(Export {
            volume: "a".into(),
            address,
            read_only,
            tls: None,
            insecure: false,
            uring: false,
        })
    };
    let device = ExportAddress::Ublk(None);
    let refused = export(&device, false).unwrap_err();
    assert!(matches!(refused, VolumesError::Export(_)), "{refused}");
    assert!(!refused.to_string().contains('\n'));
    assert!(volumes.reports()[0].exports.is_empty());
    // The kernel caches what is in it, as in a file.
    export(&socket, false).unwrap();
    assert!(matches!(export(&device, true), Err(VolumesError::FileBeside { .. })));
    let nothing = Unexport { volume: "a".into(), address: device, force: false };
    assert!(matches!(volumes.unexport(&nothing), Err(VolumesError::NotExported { .. })));
    volumes.stop();
}

#[test]
fn one_is_resized_or_says_why_not() {
    let volumes = volumes(GOOD, "");
    volumes.create(wish("a")).unwrap();
    let resize = |name: &str, size_bytes| {
        volumes.resize(&ResizeVolume { volume: name.to_owned(), size_bytes })
    };
    resize("a", 8192).unwrap();
    assert_eq!(volumes.reports()[0].size_bytes, 8192);
    let refused = resize("a", 4096).unwrap_err().to_string();
    assert!(refused.contains("`a`") && refused.contains("it is full"), "{refused}");
    assert!(matches!(resize("a", 5000), Err(VolumesError::Size(5000))));
    assert!(matches!(resize("b", 8192), Err(VolumesError::Unknown(_))));
    // Its process ends at it, and another takes the next one.
    let ended = resize("a", 12288).unwrap_err().to_string();
    assert!(ended.contains("its process ended"), "{ended}");
    wait_until_reported(&volumes, "the next process serves", |report| {
        report.restarts == 1 && report.state == VolumeState::Serving
    });
    resize("a", 8192).unwrap();
    volumes.stop();
}

#[test]
fn a_snapshot_is_a_volume_that_begins_with_its_tables() {
    // Its descriptors cannot be sent by a shell: the refusals are what is tested here.
    let script =
        GOOD.replace("*end*)", r#"*snapshot*) echo '{"no_snapshot":"no room"}' >&0 ;; *end*)"#);
    let volumes = volumes(&script, "");
    volumes.create(wish("a")).unwrap();
    let snapshot = |volume: &str, name: &str| {
        volumes.snapshot(&SnapshotVolume { volume: volume.to_owned(), name: name.to_owned() })
    };
    let refused = snapshot("a", "b").unwrap_err().to_string();
    assert!(refused.contains("`a`") && refused.contains("no room"), "{refused}");
    assert!(matches!(snapshot("a", "a"), Err(VolumesError::NameTaken(_))));
    assert!(matches!(snapshot("a", "a b"), Err(VolumesError::Name(_))));
    assert!(matches!(snapshot("c", "b"), Err(VolumesError::Unknown(_))));
    assert_eq!(volumes.reports().len(), 1, "nothing is left of them");
    volumes.stop();
}

#[test]
fn a_killed_process_is_replaced_and_its_sockets_stay() {
    let dir = tempfile::tempdir().unwrap();
    let volumes = volumes(GOOD, "");
    volumes.create(wish("a")).unwrap();
    let address = ExportAddress::Unix(dir.path().join("a.sock"));
    volumes
        .export(Export {
            volume: "a".into(),
            address: address.clone(),
            read_only: false,
            tls: None,
            insecure: false,
            uring: false,
        })
        .unwrap();
    let before = wait_until_reported(&volumes, "a process runs", |report| report.pid.is_some());
    let pid = Pid::from_raw(before.pid.unwrap() as i32).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    let after = wait_until_reported(&volumes, "the next process serves", |report| {
        report.restarts == 1 && report.state == VolumeState::Serving
    });
    assert_eq!(
        after.exports,
        [Exported { address: address.clone(), read_only: false, tls: None, uring: false }]
    );
    assert_ne!(after.pid, before.pid);
    let ExportAddress::Unix(path) = &address else { unreachable!() };
    UnixStream::connect(path).unwrap();
    volumes.stop();
    assert!(volumes.reports().is_empty() && !path.exists());
    assert!(matches!(volumes.create(wish("b")), Err(VolumesError::Stopping)));
}

#[test]
fn why_one_is_not_created_is_told_and_nothing_is_left() {
    let failing = volumes(r#"read start; echo '{"failed":"no donor"}' >&0; exit 1"#, "");
    let error = failing.create(wish("a")).unwrap_err().to_string();
    assert!(error.contains("`a`") && error.contains("no donor"), "{error}");
    assert!(failing.reports().is_empty());
    let volumes = volumes(GOOD, "");
    assert!(matches!(volumes.create(wish("a b")), Err(VolumesError::Name(_))));
    let odd = CreateVolume { size_bytes: 5000, ..wish("a") };
    assert!(matches!(volumes.create(odd), Err(VolumesError::Size(5000))));
    let mirrored = CreateVolume { copies: Some(9), ..wish("a") };
    assert!(matches!(volumes.create(mirrored), Err(VolumesError::Placement(_))));
    assert!(volumes.reports().is_empty());
}

#[test]
fn one_that_is_detached_is_nobodys_to_use_until_it_is_back_or_gone() {
    let dir = tempfile::tempdir().unwrap();
    let given = dir.path().join("given");
    let script = r#"
        read start
        echo '"serving"' >&0
        while read order; do
            case $order in
                *detach*) echo '{"detached":{"to":"b","address":"127.0.0.1:9"}}' >&0 ;;
                *keep*) if [ -e "$0" ]; then echo '{"not_kept":"node `b` has it"}' >&0; echo '"taken"' >&0
                    else echo '"kept"' >&0; fi ;;
                *delete*|*end*) echo '"released"' >&0; exit 0 ;;
            esac
        done"#;
    let volumes = volumes(script, given.to_str().unwrap());
    volumes.create(wish("disk")).unwrap();
    let detach = |to: &str, listen: Option<&str>, insecure| {
        let listen = listen.map(|listen| listen.parse().unwrap());
        let wish = DetachVolume { volume: "disk".into(), to: Some(to.into()), listen, insecure };
        volumes.detach(&wish).map_err(|error| error.to_string())
    };
    for (to, listen, why) in [
        ("a", Some("127.0.0.1:0"), "node `a` has it"),
        ("b", None, "--listen"),
        ("b", Some("0.0.0.0:0"), "no address to connect to"),
        ("b", Some("192.0.2.1:0"), "--insecure"),
    ] {
        let refused = detach(to, listen, false).unwrap_err();
        assert!(refused.contains(why), "{refused}");
    }
    let attach =
        || volumes.attach(&AttachVolume { volume: "disk".into(), from: None, read_only: false });
    assert!(matches!(attach(), Err(VolumesError::IsAttached(_))));
    for spilling in [true, false] {
        let other = CreateVolume { spill: spilling.then(|| "/spill".into()), ..wish("other") };
        volumes.create(CreateVolume { encrypt: !spilling, ..other }).unwrap();
        let listen = Some(([127, 0, 0, 1], 0).into());
        let wish =
            DetachVolume { volume: "other".into(), to: Some("b".into()), listen, insecure: false };
        let refused = volumes.detach(&wish).unwrap_err().to_string();
        assert!(refused.contains(if spilling { "spill file" } else { "TLS only" }), "{refused}");
        volumes.delete("other").unwrap();
    }

    assert_eq!(detach("b", Some("127.0.0.1:0"), false), Ok(Some(([127, 0, 0, 1], 9).into())));
    let address = "127.0.0.1:0".parse().unwrap();
    let export = Export {
        volume: "disk".into(),
        address,
        read_only: false,
        tls: None,
        insecure: false,
        uring: false,
    };
    assert!(matches!(volumes.export(export), Err(VolumesError::IsDetached { .. })));
    assert!(matches!(volumes.delete("disk"), Err(VolumesError::IsDetached { .. })));
    let smaller = ResizeVolume { volume: "disk".into(), size_bytes: 4096 };
    assert!(matches!(volumes.resize(&smaller), Err(VolumesError::IsDetached { .. })));
    assert!(detach("c", Some("127.0.0.1:0"), false).unwrap_err().contains("detached for node `b`"));
    attach().unwrap();
    assert_eq!(volumes.reports()[0].detached, None);

    detach("b", Some("127.0.0.1:0"), false).unwrap();
    std::fs::write(&given, "").unwrap();
    // It is forgotten when its process has ended, which may be before this is told.
    let refused = attach().unwrap_err().to_string();
    let either = ["node `b` has it", "another node has it"];
    assert!(either.iter().any(|why| refused.contains(why)), "{refused}");
    wait_until("the volume is forgotten", || volumes.reports().is_empty());
}

#[test]
fn a_volume_is_shared_where_others_can_come() {
    let script = r#"echo '"serving"' >&0
        while read order; do
            case $order in
                *unexport*) echo '"unexported"' >&0 ;;
                *delete*|*end*) echo '"released"' >&0; exit 0 ;;
            esac
        done"#;
    let volumes = volumes(script, "");
    volumes.create(wish("disk")).unwrap();
    let share = |listen: Option<&str>, insecure| {
        let address = ExportAddress::Nodes(listen.map(|listen| listen.parse().unwrap()));
        let volume = "disk".to_owned();
        let wish = Export { volume, address, read_only: false, tls: None, insecure, uring: false };
        volumes.export(wish).map_err(|error| error.to_string())
    };
    for (listen, why) in [
        (None, "--listen"),
        (Some("0.0.0.0:0"), "no address to connect to"),
        (Some("192.0.2.1:0"), "--insecure"),
    ] {
        let refused = share(listen, false).unwrap_err();
        assert!(refused.contains(why), "{refused}");
    }
    let ExportAddress::Nodes(Some(at)) = share(Some("127.0.0.1:0"), false).unwrap() else {
        panic!("it is shared elsewhere");
    };
    assert!(at.port() != 0 && volumes.reports()[0].exports[0].read_only);
    let refused = share(Some("127.0.0.1:0"), false).unwrap_err();
    assert!(refused.contains(&format!("it is already, at nodes:{at}")), "{refused}");
    let wish = DetachVolume { volume: "disk".into(), to: None, listen: None, insecure: false };
    let refused = volumes.detach(&wish).unwrap_err().to_string();
    assert!(refused.contains("say with --to"), "{refused}");
    // The kernel may write to a writable file at any time.
    let file = ExportAddress::Fuse("/nowhere".into());
    let volume = "disk".to_owned();
    let export = Export {
        volume,
        address: file,
        read_only: false,
        tls: None,
        insecure: false,
        uring: false,
    };
    assert!(matches!(volumes.export(export), Err(VolumesError::FileBeside { .. })));
    let wish =
        Unexport { volume: "disk".into(), address: ExportAddress::Nodes(None), force: false };
    volumes.unexport(&wish).unwrap();
    assert!(volumes.reports()[0].exports.is_empty());
    volumes.delete("disk").unwrap();
}
