//! What a pickle may not have is an error that names it and its place, whatever the bytes are.

use super::{Id, Pickle, Value};

fn refused(pickle: &[u8], words: &str) {
    let error = Pickle::parse(pickle).expect_err("it is refused").to_string();
    assert!(error.contains(words), "{pickle:?} should say {words:?}: {error}");
}

#[test]
fn instructions_and_globals_of_other_objects_are_named_and_not_run() {
    refused(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", "has `os.system` at byte 2 of its pickle");
    refused(b"c__builtin__\neval\n.", "`__builtin__.eval`");
    refused(b"ctorch.cuda\nFloatStorage\n.", "`torch.cuda.FloatStorage`");
    refused(b"ctorch\n../Storage\n.", "`torch.../Storage`");
    refused(b"ctorch\nload\n.", "`torch.load`");
    for instruction in [b'b', b'i', b'o', b'P', b'B', 0x81, 0x82, 0x92, 0x93, 0x95, 0] {
        refused(&[b'}', instruction], &format!("instruction {instruction:#04x} at byte 1"));
    }
    refused(b"ccollections\nOrderedDict\nK\x01\x85R.", "a call that rebuilds no tensor");
    refused(b"ctorch\nFloatStorage\n)R.", "a call that rebuilds no tensor");
    refused(b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x01))tR.", "a call that rebuilds no tensor");
    refused(b"K\x01\x85Q.", "a persistent id of no storage");
    refused(b"(K\x01ctorch\nFloatStorage\nX\x00\x00\x00\x00NJ\xff\xff\xff\xfftQ.", "a persistent id of no storage");
}

#[test]
fn programs_that_are_none_are_refused_where_they_go_wrong() {
    refused(b"", "an end that comes too early at byte 0");
    refused(b"}", "an end that comes too early at byte 1");
    refused(b"X\xff\xff\xff\xffab", "an end that comes too early at byte 0");
    refused(b"X\x01\x00\x00\x00\xff.", "text that is not UTF-8");
    refused(b"ctorch", "a name that does not end");
    refused(b"\x8a\x09123456789.", "an int of more than 8 bytes");
    refused(b".", "an instruction without its operands");
    refused(b"}(.", "an instruction without its operands at byte 2");
    refused(b"}}t.", "an instruction without its mark");
    refused(b"h\x00.", "a reference to nothing");
    refused(b"q\x00.", "an instruction without its operands");
    refused(b"}K\x01a.", "an append to no list");
    refused(b"](K\x01u.", "a key without a value");
    refused(b"]K\x01K\x02s.", "a key for no dict");
}

fn int(pickle: &[u8]) -> Option<i64> {
    let pickle = Pickle::parse(pickle).ok()?;
    match pickle.value(pickle.root) {
        Value::Int(number) => Some(*number),
        _ => None,
    }
}

#[test]
fn ints_of_every_length_are_read() {
    assert_eq!(int(b"K\xff."), Some(255));
    assert_eq!(int(b"M\xff\xff."), Some(65_535));
    assert_eq!(int(b"J\xff\xff\xff\xff."), Some(-1));
    assert_eq!(int(b"\x8a\x00."), Some(0));
    assert_eq!(int(b"\x8a\x05\x00\x00\x00\x00\x01."), Some(1 << 32));
    assert_eq!(int(b"\x8a\x02\x00\x80."), Some(-32_768));
    assert_eq!(int(b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f."), Some(i64::MAX));
}

/// A value that holds itself, and one that holds another twice at every level: neither recurses nor grows.
#[test]
fn values_that_refer_to_each_other_take_no_more_memory_than_their_bytes() {
    let itself = Pickle::parse(b"]q\x00h\x00a.").expect("it is a list");
    assert!(matches!(itself.value(itself.root), Value::List(items) if items[..] == [itself.root]));
    let mut doubled = b"K\x01".to_vec();
    doubled.extend(b"q\x00h\x00\x86".repeat(1000));
    doubled.push(b'.');
    let doubled = Pickle::parse(&doubled).expect("it is a tuple");
    assert_eq!(doubled.values.len(), 1001);
}

/// The pickle of a real tensor, with every byte changed to every other one and to nothing.
#[test]
fn no_change_of_a_real_pickle_brings_the_reader_down() {
    let mut good =
        b"\x80\x02}q\x00(K\x00ctorch._utils\n_rebuild_tensor_v2\nq\x01((X\x07\x00\x00\x00storageq\x02".to_vec();
    good.extend(
        b"ctorch\nFloatStorage\nq\x03X\x01\x00\x00\x000q\x04X\x03\x00\x00\x00cpuq\x05K\x06tq\x06QK\x00K\x06\x85q\x07",
    );
    good.extend(b"K\x01\x85q\x08\x89ccollections\nOrderedDict\nq\x09)Rq\x0atq\x0bRq\x0cu.");
    let pickle = Pickle::parse(&good).expect("it is good");
    let Value::Dict(items) = pickle.value(pickle.root) else { panic!("it is a dict") };
    let tensor = |(_, value): &(Id, Id)| match pickle.value(*value) {
        Value::Tensor(tensor) => Some((tensor.offset, pickle.flat(tensor.shape), pickle.flat(tensor.stride))),
        _ => None,
    };
    assert_eq!(items.iter().map(tensor).collect::<Vec<_>>(), [Some((0, Some(6), Some(1)))]);
    for at in 0..good.len() {
        assert!(Pickle::parse(&good[..at]).is_err(), "cut at {at}");
        for byte in 0..=u8::MAX {
            let mut bytes = good.clone();
            bytes[at] = byte;
            let _ = Pickle::parse(&bytes);
        }
    }
}
