-- compatible: yes
--
-- Where input and output of a flow are Sensitive, as JSON pointers, so that whoever shows an execution needs none of its
-- code: {"input": ["/card"], "output": ["/token"]}. What is asked says it in the journal. Null: written before there was
-- such a thing, or by nobody who has the code.
alter table waypost.definition
    add column sensitive jsonb;
