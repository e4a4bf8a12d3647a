"""A recorded engine: the answers of an engine are stored in a file and replayed without the engine.

To record, ``engine_recorder`` runs in front of an engine: ``relay`` forwards requests and replies, part by part, and
``call_writer`` appends both to the file. To replay, ``recorded_engine`` runs in its place: ``replay_answers`` takes
each answer from the ``cassette`` and plays it; ``replayed_state`` models pauses and aborts. Both share the server in
``served_engine``. ``pytest_plugin`` has the fixture for tests.

Import from the folder above: ``from forebay.replay import RecordedEngine, EngineRecorder``.
"""
